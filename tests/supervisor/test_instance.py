"""One pool per runtime directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpupool.paths import RuntimeDir
from gpupool.supervisor import instance
from gpupool.supervisor.instance import AlreadyRunning, Instance, LeftoverProcesses


def test_a_second_instance_is_refused_and_names_the_first(tmp_path: Path) -> None:
    first = Instance(RuntimeDir(tmp_path / "run"))
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        Instance(RuntimeDir(tmp_path / "run"))
    first.close()
    Instance(RuntimeDir(tmp_path / "run")).close()


def test_two_directories_do_not_disturb_each_other(tmp_path: Path) -> None:
    a, b = Instance(RuntimeDir(tmp_path / "a")), Instance(RuntimeDir(tmp_path / "b"))
    a.close()
    b.close()


def test_leftovers_of_a_killed_pool_do_not_hinder_the_next(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o750)
    for name in ("control.sock", "workers.sock", "lock", "life"):
        (run / name).write_text("garbage")
    Instance(RuntimeDir(run)).close()
    assert sorted(p.name for p in run.iterdir()) == ["life", "lock"]


def test_the_next_pool_waits_for_the_last_ones_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "_LEFTOVER_WAIT_S", 0.2)
    first = Instance(RuntimeDir(tmp_path / "run"))
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[first.life_fd])
    try:
        first.close()
        with pytest.raises(LeftoverProcesses, match="fuser"):
            Instance(RuntimeDir(tmp_path / "run"))
    finally:
        child.communicate()
    Instance(RuntimeDir(tmp_path / "run")).close()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o777)
    with pytest.raises(PermissionError, match="written by others"):
        Instance(RuntimeDir(run))
