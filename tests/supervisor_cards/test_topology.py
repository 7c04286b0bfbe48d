"""CPUs next to a card and threads per worker, from a pretended /sys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.cards.topology import cores_of, cpus_of, near_cpus, parse_cpulist, physical_cores, threads_per_worker

BUS = "0000:3b:00.0"
ALL = frozenset(range(8))


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Two nodes of two cores with two hardware threads each: 0,4 1,5 | 2,6 3,7; the card sits on node 1."""
    device = tmp_path / "bus/pci/devices" / BUS
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (device / "local_cpulist").write_text("2-3,6-7\n")
    for cpu in ALL:
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def test_a_card_has_the_cpus_of_its_node(sys: Path) -> None:
    cpus = cpus_of(BUS, ALL, sys)
    assert cpus == frozenset({2, 3, 6, 7})
    assert cpus is not None
    assert cores_of(cpus, sys) == 2


def test_an_unknown_card_is_left_unpinned(sys: Path) -> None:
    assert cpus_of("0000:ff:00.0", ALL, sys) is None
    assert cpus_of("", ALL, sys) is None


@pytest.mark.parametrize(
    ("node", "cpulist", "allowed"),
    [("-1", "0-7", ALL), ("1", "2-3,6-7", {2, 3}), ("1", "", ALL), ("one", "2-3", ALL), ("1", "2-x", ALL), ("", "", ALL)],
    ids=["no node", "smaller cpuset", "no cpus", "bad node", "bad list", "empty"],
)
def test_what_is_not_certain_is_left_alone(node: str, cpulist: str, allowed: frozenset[int]) -> None:
    assert near_cpus(node, cpulist, allowed) is None


def test_cpus_without_a_known_core_count_one_each(sys: Path) -> None:
    assert cores_of({0, 4, 1}, sys) == 2
    assert cores_of({0, 900, 901}, sys) == 3
    assert physical_cores([1, 2], {1: "rubbish"}) == 2


@pytest.mark.parametrize(("cores", "workers", "threads"), [(16, 4, 4), (16, 3, 5), (2, 8, 1), (0, 1, 1), (8, 0, 8)])
def test_the_workers_of_a_node_share_its_cores(cores: int, workers: int, threads: int) -> None:
    assert threads_per_worker(cores, workers) == threads


@pytest.mark.parametrize("text", ["3-1", "a", "-1", "1-", "0-99999999999", "1;2"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"CPUs|invalid literal"):
        parse_cpulist(text)


@given(st.frozensets(st.integers(0, 500)))
def test_a_list_written_out_is_read(cpus: frozenset[int]) -> None:
    assert parse_cpulist(",".join(map(str, sorted(cpus))) + "\n") == cpus
