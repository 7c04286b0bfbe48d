"""Which signal a process listens to for its stacks, and that it leaves another's alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.stack_dump import SIGNALS, Listener, listener

#: In a process of its own: faulthandler's handlers are its process's. Each line read is run, each answered.
PROGRAM = """
import signal, sys
from gpupool.stack_dump import StackDump
def outermost(): exec(sys.stdin.read())
taken = []
def mine(number, frame): taken.append(number)
outermost()
"""


def play(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=script, capture_output=True, text=True, timeout=60, check=False, cwd=os.getcwd()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_stacks_follow_the_header_each_time_the_signal_comes(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    play(f"StackDump({str(file)!r})\nfor _ in range(2): signal.raise_signal(signal.SIGUSR2)")

    header, *lines = file.read_text().splitlines()
    assert json.loads(header)["signal"] == SIGNALS[0] == signal.SIGUSR2
    assert sum("in outermost" in line for line in lines) == 2
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_signal_that_the_model_takes_is_left_to_it_and_the_next_one_serves(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    out = play(f"""
dump = StackDump({str(file)!r})
signal.signal(signal.SIGUSR2, mine)
dump.listen()
signal.raise_signal(signal.SIGUSR2)
print([signal.Signals(n).name for n in taken])
signal.raise_signal(signal.SIGUSR1)
""")

    assert out == "['SIGUSR2']\n"
    header, *lines = file.read_text().splitlines()
    assert json.loads(header)["signal"] == signal.SIGUSR1
    assert any("in outermost" in line for line in lines)


def test_one_that_was_gone_past_is_taken_again_after_load(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    play(f"""
dump = StackDump({str(file)!r})
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # the signal would now end this process
dump.listen_anew()
signal.raise_signal(signal.SIGUSR2)
""")

    assert "in outermost" in file.read_text()


def test_one_that_was_borrowed_and_put_back_is_taken_again_with_the_next_beat(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    play(f"""
dump = StackDump({str(file)!r})
signal.signal(signal.SIGUSR2, signal.signal(signal.SIGUSR2, mine))
dump.listen()
signal.raise_signal(signal.SIGUSR2)
""")

    assert "in outermost" in file.read_text()


def test_when_the_model_has_taken_all_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    play(f"dump = StackDump({str(file)!r})\nfor n in {[int(n) for n in SIGNALS]}: signal.signal(n, mine)\ndump.listen()")

    assert json.loads(file.read_text())["signal"] == 0


def test_without_a_file_or_a_folder_nothing_is_taken() -> None:
    out = play("StackDump('')\nStackDump('/nowhere/stacks')\nprint(signal.getsignal(signal.SIGUSR2))")

    assert out == f"{signal.SIG_DFL}\n"


@pytest.mark.parametrize("text", ["", "\n", "[]", '{"pid": 1}', '{"pid": "x", "signal": 1}', "\x00" * 1000])
def test_a_file_that_nobody_writes_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "stacks").write_text(text)

    assert listener(tmp_path / "stacks") is None
    assert listener(tmp_path / "none") is None


def test_a_header_names_process_signal_and_where_the_stacks_begin(tmp_path: Path) -> None:
    header = '{"pid": 7, "signal": 12}\n'
    (tmp_path / "stacks").write_text(f"{header}Thread\n")

    assert listener(tmp_path / "stacks") == Listener(7, 12, len(header))
