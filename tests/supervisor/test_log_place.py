"""Where the log can be read: the file it goes to, or the unit whose journal has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.supervisor.log_place import journal_unit, log_file, unit_of
from gpupool.supervisor.state_file import journal_path


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/gpupool.service\n", "gpupool.service"),
        ("0::/system.slice/system-gpupool.slice/gpupool@a.service\n", "gpupool@a.service"),
        ("12:cpu:/\n1:name=systemd:/system.slice/gpupool.service\n0::/\n", "gpupool.service"),
        ("0::/system.slice/gpupool.service/workers\n", "gpupool.service"),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_the_unit_is_read_from_the_control_group(cgroup: str, unit: str | None) -> None:
    assert unit_of(cgroup) == unit


def test_a_configured_file_counts_more_than_stderr() -> None:
    assert log_file("/var/log/pool.log") == "/var/log/pool.log"


def test_the_file_that_stderr_goes_to_is_named_and_a_pipe_is_none(tmp_path: Path) -> None:
    code = "from gpupool.supervisor.log_place import log_file; print(log_file(''))"
    root = str(Path(__file__).parents[2])
    with (tmp_path / "err").open("wb") as err:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=err, check=True, cwd=root, timeout=30
        )
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=root, timeout=30)

    assert done.stdout.decode().strip() == str(tmp_path / "err")
    assert piped.stdout.decode().strip() == "None"


def test_only_a_stderr_that_leads_there_is_in_the_journal() -> None:
    there = os.fstat(2)

    assert journal_unit({}) is None
    assert journal_unit({"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino + 1}"}) is None


def test_the_journal_lies_beside_the_state() -> None:
    assert journal_path({}, Path("/run/g"), "a/b") == Path("/run/g/a_b.events.jsonl")
    assert journal_path({"STATE_DIRECTORY": "/var/lib/g"}, Path("/run/g"), "main") == Path("/var/lib/g/main.events.jsonl")
