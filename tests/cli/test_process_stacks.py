"""Whose stacks: only those of a process that is the pool's own, from before the look until after it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpupool.cli import process_stacks
from gpupool.cli.process_stacks import NoStacks, stacks_of


def test_a_pid_that_is_somebody_elses_now_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def look(pid: int, *_: object) -> bytes:
        looked_at.append(pid)
        return b"its stacks"

    monkeypatch.setattr(process_stacks, "_by_py_spy", look)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with pytest.raises(NoStacks, match=f"not of this pool .*its parent is process {os.getpid()}, not {os.getppid()}"):
                stacks_of(child.pid, Path("/none"), timeout_s=1.0, parent=os.getppid())
            assert looked_at == []
            assert stacks_of(child.pid, Path("/none"), timeout_s=1.0, parent=os.getpid()).text == "its stacks"
        finally:
            child.kill()


def test_what_was_seen_of_a_process_that_ended_meanwhile_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may have been another's by then."""
    with subprocess.Popen(["sleep", "60"]) as child:

        def look(*_: object) -> bytes:
            child.kill()
            child.wait()
            return b"somebody else's"

        monkeypatch.setattr(process_stacks, "_by_py_spy", look)
        with pytest.raises(NoStacks, match="ended meanwhile"):
            stacks_of(child.pid, Path("/none"), timeout_s=1.0, parent=os.getpid())
        with pytest.raises(NoStacks, match="No such process"):
            stacks_of(child.pid, Path("/none"), timeout_s=1.0, parent=os.getpid())
