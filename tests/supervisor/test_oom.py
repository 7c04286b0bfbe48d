"""Was it the OOM killer? Told from trees that look as the kernel's do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupool.supervisor.oom import FRESH_S, OomWatch, candidates, count_in

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 17\noom 3\noom_kill {}\noom_group_kill 9\n"
LEGACY = (
    "12:cpu,cpuacct:/\n9:name=systemd:/system.slice\n4:memory:/system.slice/gpupool.service\n0::/system.slice/gpupool.service\n"
)
UNIFIED = "0::/system.slice/gpupool.service\n"
FILES = {
    "version 1": (LEGACY, "sys/fs/cgroup/memory/system.slice/gpupool.service/memory.oom_control", V1),
    "version 1, another namespace's path": (LEGACY, "sys/fs/cgroup/memory/memory.oom_control", V1),
    "version 2": (UNIFIED, "sys/fs/cgroup/system.slice/gpupool.service/memory.events", V2),
    "version 2, another namespace's path": (UNIFIED, "sys/fs/cgroup/memory.events", V2),
    "version 2 beside 1": (UNIFIED, "sys/fs/cgroup/unified/system.slice/gpupool.service/memory.events", V2),
}


def tree(root: Path, membership: str, file: str, text: str) -> Path:
    """Make a tree with one membership and one file; return the file."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text(text)
    return root / file


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (V1.format(5), 5),
        (V2.format(0), 0),
        ("oom_kill_disable 1\nunder_oom 0\n", None),
        ("oom_kill many\n", None),
        ("oom_kill -1\n", None),
        ("oom_kill\n", None),
        ("", None),
    ],
)
def test_the_count_is_read_and_nothing_like_it(text: str, count: int | None) -> None:
    assert count_in(text) == count


def test_lines_that_are_no_membership_are_skipped() -> None:
    assert candidates("") == []
    assert candidates("nonsense\n1:2\n7:pids:/x\n") == []
    assert candidates("4:memory:/a:b\n")[0] == Path("sys/fs/cgroup/memory/a:b/memory.oom_control")


@pytest.mark.parametrize(("membership", "file", "text"), FILES.values(), ids=FILES.keys())
def test_a_kill_explains_one_exit(tmp_path: Path, membership: str, file: str, text: str) -> None:
    events = tree(tmp_path, membership, file, text.format(2))
    watch = OomWatch(tmp_path)
    assert watch.available
    assert not watch.claim(1.0)

    events.write_text(text.format(3))

    assert watch.claim(2.0)
    assert not watch.claim(2.1)


def test_two_kills_explain_two_exits(tmp_path: Path) -> None:
    events = tree(tmp_path, *FILES["version 2"][:2], V2.format(0))
    watch = OomWatch(tmp_path)
    events.write_text(V2.format(2))

    assert [watch.claim(1.0 + n) for n in range(3)] == [True, True, False]


def test_a_kill_of_somebody_else_long_ago_explains_nothing(tmp_path: Path) -> None:
    events = tree(tmp_path, *FILES["version 2"][:2], V2.format(0))
    watch = OomWatch(tmp_path)
    events.write_text(V2.format(1))
    watch.look(5.0)

    assert not watch.claim(5.1 + FRESH_S)


def test_a_slow_exit_is_still_explained(tmp_path: Path) -> None:
    events = tree(tmp_path, *FILES["version 1"][:2], V1.format(0))
    watch = OomWatch(tmp_path)
    events.write_text(V1.format(1))
    watch.look(5.0)

    assert watch.claim(5.0 + FRESH_S)


def test_a_system_that_does_not_tell_blames_nobody(tmp_path: Path) -> None:
    watch = OomWatch(tmp_path)

    assert not watch.available
    assert not watch.claim(1.0)


def test_a_file_that_goes_away_and_comes_back_counts_nothing_twice(tmp_path: Path) -> None:
    events = tree(tmp_path, *FILES["version 2"][:2], V2.format(4))
    watch = OomWatch(tmp_path)
    events.unlink()
    assert not watch.claim(1.0)
    events.write_text(V2.format(4))

    assert not watch.claim(2.0)
