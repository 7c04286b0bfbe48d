"""Records become lines whatever they hold, and a broken log harms nobody."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.log_file import LogFile
from gpupool.log_sink import MAX_LINE_BYTES, LogSink, render_json


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


BASE = {"time": 1.5, "timestamp": "t", "level": "info", "event": "e", "component": "c", "pid": 1}


@pytest.mark.parametrize(
    "odd",
    [
        float("nan"), float("inf"), b"\xff\x00", {(1, 2): 3}, {"a": {(1, 2): b"x"}}, "line\nline\u2028", "\ud800", Unspeakable(),
        {1, 2}, 2**70, [Unspeakable()], {1: 2}, object, [[[[[[[[[[[1]]]]]]]]]]],
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_whatever_a_field_holds_the_line_is_strict_json_with_its_keys(odd: Any) -> None:
    line = render_json({**BASE, "odd": odd})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["time"] == 1.5
    assert record["pid"] == 1
    assert "odd" in record


def test_a_long_line_is_cut_keeps_its_keys_and_says_how_long_it_was() -> None:
    line = render_json({**BASE, "traceback": "x" * 50_000 + "ValueError: the end", "line": "y" * 9000})
    assert len(line) <= MAX_LINE_BYTES
    record = json.loads(line)
    assert record["event"] == "e"
    assert record["cut_from_bytes"] > 59_000
    assert record["traceback"].endswith("ValueError: the end")


def test_even_a_thousand_fields_make_one_line_in_bounds() -> None:
    line = render_json({**BASE, **{f"field{n}": "x" * 50 for n in range(1000)}})
    assert len(line) <= MAX_LINE_BYTES
    assert json.loads(line)["event"] == "e"


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.floats() | st.text() | st.binary() | st.integers(),
            lambda c: st.lists(c) | st.dictionaries(st.text(), c),
        ),
    )
)
def test_any_record_renders(fields: dict[str, Any]) -> None:
    json.loads(render_json({**fields, **BASE}))


def read_all(fd: int) -> list[dict[str, Any]]:
    with os.fdopen(fd, "rb") as file:
        return [json.loads(line) for line in file]


def test_lines_come_out_in_order_and_whole() -> None:
    read_end, write_end = os.pipe()
    sink = LogSink(write_end)
    for n in range(100):
        sink.put({**BASE, "n": n})
    sink.close()
    os.close(write_end)
    assert [r["n"] for r in read_all(read_end)] == list(range(100))


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    sink = LogSink(write_end)
    for _ in range(10):
        sink.put(dict(BASE))
    sink.close()
    os.close(write_end)
    assert sink.dropped["info"] == 10


def test_a_full_device_costs_lines_and_nothing_else() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    sink = LogSink(fd)
    sink.put(dict(BASE))
    sink.close()
    os.close(fd)
    assert sink.dropped["info"] == 1


def test_a_stuck_reader_never_blocks_the_writer_and_the_least_important_gives_way() -> None:
    read_end, write_end = os.pipe()
    sink = LogSink(write_end, size=50)
    filler = "x" * 3000
    started = time.monotonic()
    for n in range(200):
        sink.put({**BASE, "n": n, "filler": filler})
    for n in range(20):
        sink.put({**BASE, "level": "error", "n": n})
    assert time.monotonic() - started < 1.0
    assert sink.dropped["info"] > 50
    assert sink.dropped["error"] == 0
    records: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: records.extend(read_all(read_end)))
    reader.start()
    sink.close(timeout_s=10.0)
    os.close(write_end)
    reader.join(10.0)
    assert [r["n"] for r in records if r["level"] == "error"] == list(range(20))
    told = sum(r["dropped"]["info"] for r in records if r["event"] == "log_records_dropped")
    assert told == sink.dropped["info"]


def test_a_full_pipe_that_does_not_block_is_waited_for_within_bounds() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    sink = LogSink(write_end, size=1000)
    for n in range(60):
        sink.put({**BASE, "n": n, "filler": "x" * 3000})
    records: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: records.extend(read_all(read_end)))
    reader.start()
    sink.close(timeout_s=10.0)
    os.close(write_end)
    reader.join(10.0)
    assert len([r for r in records if "n" in r]) + sink.dropped["info"] == 60


def test_a_file_that_is_rotated_under_load_keeps_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    sink = LogSink(LogFile(-1, str(path)))
    written = 0
    for turn in range(2):
        inode = path.stat().st_ino
        path.rename(tmp_path / f"log.{turn}")
        if turn:  # logrotate's `create`, before that its `nocreate`
            path.touch(0o640)
        end = time.monotonic() + 10.0
        while not (path.exists() and path.stat().st_ino != inode and path.stat().st_size):
            assert time.monotonic() < end, "the new file is not written to"
            for _ in range(100):
                sink.put({**BASE, "n": written})
                written += 1
            time.sleep(0.002)
    sink.close(10.0)

    lines = [json.loads(line)["n"] for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert sorted(lines) == list(range(written))
    assert not sink.dropped


def test_a_file_in_a_folder_that_is_gone_is_written_on_and_taken_up_again(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = LogFile(-1, str(folder / "log"))
    folder.rename(tmp_path / "away")
    file.look()
    assert file.write(b"one\n")

    folder.mkdir()
    file.look()
    assert file.write(b"two\n")

    assert (tmp_path / "away" / "log").read_text() == "one\n"
    assert (folder / "log").read_text() == "two\n"


def test_a_disk_that_was_full_is_written_to_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    sink = LogSink(LogFile(-1, str(path)))
    sink.put({**BASE, "n": 0})
    end = time.monotonic() + 10.0
    while not sink.dropped["info"]:
        assert time.monotonic() < end, "no record was lost to a full disk"
        time.sleep(0.002)

    path.unlink()  # as if there were room again: the next failed write finds the new file
    written = 1
    while not path.exists():
        assert time.monotonic() < end, "the file was not opened again"
        sink.put({**BASE, "n": written})
        written += 1
        time.sleep(0.002)
    sink.put({**BASE, "n": "last"})
    sink.close(10.0)

    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["n"] for r in records if "n" in r][-1] == "last"
    assert sum(r["dropped"]["info"] for r in records if r["event"] == "log_records_dropped") == sink.dropped["info"]
    assert sink.dropped["info"] + sum("n" in r for r in records) == written + 1
