"""Searching a log by blocks finds what reading it line by line would."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
