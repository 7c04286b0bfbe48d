"""A line that broke off costs no other, and a descriptor that others closed ends nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpupool.log_file import LogFile
from gpupool.log_sink import LogSink
from support.running import until


def test_a_line_that_another_process_left_torn_does_not_swallow_ours(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"torn')
    assert LogFile(2, str(path)).write(b"{}\n") == 3
    assert path.read_bytes() == b'{"torn\n{}\n'


def test_the_same_for_a_descriptor_that_is_for_writing_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"torn')
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    LogFile(fd).write(b"{}\n")
    os.close(fd)
    assert path.read_bytes() == b'{"torn\n{}\n'


def test_a_log_whose_descriptor_others_have_closed_opens_its_file_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    out = LogFile(2, str(path))
    os.close(out._fd)
    assert out.write(b"1\n") == 0
    assert out.write(b"2\n") == 2
    assert path.read_bytes() == b"2\n"


def test_lines_into_a_file_that_nobody_can_find_count_as_lost(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    out = LogFile(2, str(folder / "log"))
    shutil.rmtree(folder)
    out.look()
    assert out.write(b"1\n") == 0
    folder.mkdir()
    out.look()
    assert out.write(b"2\n") == 2
    assert (folder / "log").read_bytes() == b"2\n"


def test_who_has_nothing_to_say_lets_go_of_a_deleted_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupool.log_sink._LOOK_EVERY_S", 0.02)
    path = tmp_path / "log"
    out = LogFile(2, str(path))
    sink = LogSink(out)
    path.unlink()
    assert any(path.exists() and os.fstat(out._fd).st_nlink for _ in until(10.0))
    sink.close()


def test_an_error_on_the_way_out_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    class Broken(LogFile):
        def write(self, lines: bytes) -> int:
            raise RuntimeError

    sink = LogSink(Broken(2, str(tmp_path / "log")))
    sink.put({"level": "info", "time": 1.0})
    sink.close()
    assert sink.dropped == {"info": 1}
    sink.put({"level": "error", "time": 1.0})
    sink.close()
    assert sink.dropped == {"info": 1, "error": 1}
