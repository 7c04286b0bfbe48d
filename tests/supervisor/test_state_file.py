"""The state file on a real disk: whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpupool.supervisor.kept import Kept, KeptCard, KeptSlot
from gpupool.supervisor.state_file import boot_id, load, save, state_path

KEPT = Kept({"cpu:0": KeptSlot(held=True)}, {"GPU-1": KeptCard("lost", "gone", "power_cycle", 79, "boot", 5.0)})


def test_the_state_directory_of_systemd_wins_over_the_runtime_directory() -> None:
    assert state_path({}, Path("/run/g"), "main") == Path("/run/g/main.state.json")
    assert state_path({"STATE_DIRECTORY": "/var/lib/g:/var/lib/h"}, Path("/run/g"), "a/b") == Path("/var/lib/g/a_b.state.json")


def test_what_is_saved_is_loaded_and_only_ours_to_read(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    save(path, Kept())
    save(path, KEPT)
    assert load(path) == (KEPT, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["s.json"]


def test_no_file_is_no_problem(tmp_path: Path) -> None:
    assert load(tmp_path / "none") == (Kept(), "")


@pytest.mark.parametrize(
    "data", [b"", b"rubbish", b"\x00" * 100, b" " * ((1 << 20) + 1)], ids=["empty", "text", "zeros", "huge"]
)
def test_rubbish_is_told_moved_aside_and_not_in_the_way(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(data)
    kept, problem = load(path)
    assert kept == Kept()
    assert "moved to s.json.bad" in problem
    assert (tmp_path / "s.json.bad").read_bytes() == data
    assert load(path) == (Kept(), "")
    save(path, KEPT)
    assert load(path) == (KEPT, "")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "real", KEPT)
    (tmp_path / "s.json").symlink_to("real")
    kept, problem = load(tmp_path / "s.json")
    assert kept == Kept()
    assert "cannot be read" in problem


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.json"
    save(path, KEPT)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(path, Kept())
    assert load(path) == (KEPT, "")
    assert os.listdir(tmp_path) == ["s.json"]


def test_what_a_killed_supervisor_left_half_written_is_not_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    (tmp_path / ".s.json.new").write_text('{"version"')
    save(path, KEPT)
    assert load(path) == (KEPT, "")


def test_a_boot_has_an_id() -> None:
    assert len(boot_id()) == 36
    assert boot_id() == boot_id()
