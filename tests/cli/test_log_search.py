"""Searching a log by blocks finds what reading it line by line would."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.cli import log_source
from gpupool.cli.log_search import Search
from gpupool.cli.log_source import log_files
from gpupool.cli.output import Failure

LINES = st.lists(
    st.sampled_from(["", "noise", '{"id":"a"}', '{"id":"b","x":"a"}', '{"id":"c"}', 'host {"id":"a"}', '{"id":"a"'])
)


@given(LINES, st.lists(st.integers(1, 20), min_size=1), st.booleans())
def test_no_cut_between_blocks_hides_a_line_or_shows_it_twice(lines: list[str], cuts: list[int], ended: bool) -> None:
    data = "\n".join(lines).encode() + (b"\n" if ended else b"")
    blocks, at, n = [], 0, 0
    while at < len(data):
        blocks.append(data[at : at + cuts[n % len(cuts)]])
        at, n = at + cuts[n % len(cuts)], n + 1
    wanted = [line[line.find("{") :] for line in lines if '"a"' in line or '"c"' in line]

    found = list(Search([b'"a"', b'"c"']).records(blocks))

    assert found == [json.loads(text) for text in wanted if text.endswith("}")]


def test_how_far_the_log_reaches_is_known_though_nothing_was_found() -> None:
    search = Search([b'"x"'])

    assert list(search.records([b'not json\n{"time":1.5}\n{"ti', b'me":2}\n{"time":3}\n{"torn'])) == []
    assert search.first == {"time": 1.5}
    assert search.last == {"time": 3}


def test_an_endless_line_is_not_kept() -> None:
    search = Search([b'"a"'])

    assert list(search.records([*[b"x" * (1 << 20)] * 8, b'\n{"id":"a"}\n'])) == [{"id": "a"}]


def test_the_older_files_beside_a_log_come_first_packed_or_not(tmp_path: Path) -> None:
    log = tmp_path / "pool.log"
    log.write_text("new\n")
    (tmp_path / "pool.log.1").write_text("middle\n")
    (tmp_path / "pool.log.2.gz").write_bytes(gzip.compress(b"old\n"))
    (tmp_path / "pool.log.bak").write_text("other\n")
    (tmp_path / "xpool.log.1").write_text("other\n")
    for age, name in enumerate(("pool.log", "pool.log.1", "pool.log.2.gz")):
        os.utime(tmp_path / name, (1000 - age, 1000 - age))

    assert b"".join(log_files(log).blocks()) == b"old\nmiddle\nnew\n"
    assert b"".join(log_files(tmp_path / "pool.log.2.gz").blocks()) == b"old\n"


@pytest.mark.parametrize("content", [None, b"\x1f\x8bgarbage"])
def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    log = tmp_path / "pool.log"
    if content:
        log.write_bytes(content)

    with pytest.raises(Failure, match=str(log)):
        list(log_files(log).blocks())


def rotated(folder: Path, **contents: bytes) -> Path:
    """A log and what it was rotated into, the youngest first; `_` stands for a dot."""
    for age, (name, content) in enumerate(contents.items()):
        (folder / name.replace("_", ".")).write_bytes(content)
        os.utime(folder / name.replace("_", "."), (1000 - age, 1000 - age))
    return folder / "pool.log"


def test_an_older_file_that_cannot_be_read_is_told_and_costs_itself_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = gzip.compress(os.urandom(100_000) + b"old")[:50_000]
    log = rotated(
        tmp_path, pool_log=b'{"id":"new"}\n', pool_log_1=b'{"id":"middle"}\n', pool_log_2_gz=b"\x1f\x8bjunk", pool_log_3_gz=torn
    )
    (tmp_path / "pool.log.4").symlink_to(tmp_path / "pool.log.4")  # cannot be looked at
    (tmp_path / "pool.log.5").mkdir()

    assert list(Search([b'"id"']).records(log_files(log).blocks())) == [{"id": "middle"}, {"id": "new"}]

    told = capsys.readouterr().err
    assert "pool.log.2.gz" in told
    assert "pool.log.3.gz" in told
    assert "pool.log.1" not in told


def test_what_is_being_packed_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = rotated(tmp_path, pool_log=b"new\n", pool_log_1=b"old\n", pool_log_1_gz=gzip.compress(b"old\n")[:10])

    assert b"".join(log_files(log).blocks()) == b"old\nnew\n"
    assert not capsys.readouterr().err


def test_a_link_to_the_newest_file_is_that_file(tmp_path: Path) -> None:
    rotated(tmp_path, pool_log_2=b"new\n", pool_log_1=b"old\n")
    (tmp_path / "pool.log").symlink_to("pool.log.2")

    assert b"".join(log_files(tmp_path / "pool.log").blocks()) == b"old\nnew\n"


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_rotation_meanwhile_neither_hides_a_file_nor_shows_one_twice(tmp_path: Path, after: int) -> None:
    log = rotated(tmp_path, pool_log=b"3\n", pool_log_1=b"2\n", pool_log_2=b"1\n")
    blocks = log_files(log).blocks()

    seen = [next(blocks) for _ in range(after)]
    (tmp_path / "pool.log.2").rename(tmp_path / "pool.log.3")
    (tmp_path / "pool.log.1").rename(tmp_path / "pool.log.2")
    log.rename(tmp_path / "pool.log.1")
    log.write_bytes(b"4\n")
    for name in ("pool.log.3", "pool.log.2"):  # as logrotate and gzip do: the time of the last change is kept
        plain = tmp_path / name
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        os.utime(packed, (plain.stat().st_mtime, plain.stat().st_mtime))
        plain.unlink()

    assert [*seen, *blocks] == [b"1\n", b"2\n", b"3\n", b"4\n"]


def test_a_file_that_is_renamed_just_before_it_is_opened_is_found_under_its_new_name(tmp_path: Path) -> None:
    log = rotated(tmp_path, pool_log=b"2\n", pool_log_1=b"1\n")
    opened = log_source._open

    def rotate_first(path: Path) -> Any:
        if path == log and not (tmp_path / "pool.log.2").exists():
            (tmp_path / "pool.log.1").rename(tmp_path / "pool.log.2")
            log.rename(tmp_path / "pool.log.1")
            log.write_bytes(b"3\n")
        return opened(path)

    with mock.patch.object(log_source, "_open", rotate_first):
        assert list(log_files(log).blocks()) == [b"1\n", b"2\n", b"3\n"]
