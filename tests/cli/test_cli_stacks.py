"""stacks: whose they are, what is printed, and what is said where there are none."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gpupool.cli import main, stacks
from gpupool.cli.process_stacks import NoStacks, Stacks
from gpupool.exits import Exit
from support.fake_pool import FakePool, document, ok, steady, worker


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, tuple[str, ...], int | None]]:
    """Which processes were looked at: pid, name of the file, options, whose child it must be."""
    seen = []

    def look(pid: int, file: Path, *, timeout_s: float, options: tuple[str, ...] = (), parent: int | None = None) -> Stacks:
        assert timeout_s == 10.0
        seen.append((pid, file.name, options, parent))
        return Stacks(pid, "signal", "Thread 1\n  forward", True, "py-spy is not installed")

    monkeypatch.setattr(stacks, "stacks_of", look)
    return seen


def run(pool: FakePool, *arguments: str) -> int:
    return main(["stacks", *arguments, "--runtime-dir", str(pool.folder)])


def test_a_worker_is_found_by_number_or_device_and_the_means_is_told(
    looked_at: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with FakePool(steady(document(router={}, pid=77))) as pool:
        assert run(pool, "0") == Exit.OK
        out = capsys.readouterr().out
        assert run(pool, "cpu:1", "--json", "--native") == Exit.OK
        assert run(pool, "--router") == Exit.OK

    assert looked_at == [
        (4000, "stacks-worker-0.txt", (), 1), (4001, "stacks-worker-1.txt", ("--native",), 1), (77, "stacks-router.txt", (), 1),
    ]  # fmt: skip
    assert out == "worker 0, pid 4000, by signal (py-spy is not installed)\n\nThread 1\n  forward\n… and more, cut off here\n"
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {
        "process": "worker 1", "pid": 4001, "means": "signal", "text": "Thread 1\n  forward", "truncated": True,
        "note": "py-spy is not installed",
    }  # fmt: skip


def test_a_supervisor_that_answers_nothing_is_found_all_the_same(looked_at: list[Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/control.sock")
        listening.listen()
        assert main(["stacks", "--supervisor", "--runtime-dir", folder]) == Exit.OK

    assert looked_at == [(os.getpid(), "stacks-supervisor.txt", (), None)]


@pytest.mark.parametrize("arguments", [(), ("0", "--router"), ("--router", "--supervisor")])
def test_one_process_is_to_be_named(looked_at: list[Any], arguments: tuple[str, ...]) -> None:
    assert main(["stacks", *arguments]) == Exit.USAGE
    assert looked_at == []


def test_a_worker_that_is_not_there_or_has_no_process_is_told(looked_at: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(lambda _: ok(document(worker(0, "parked", pid=None)))) as pool:
        assert run(pool, "7") == Exit.FAILED
        assert "there are 0 (cpu:0)" in capsys.readouterr().err
        assert run(pool, "0") == Exit.FAILED
        assert "worker 0 has no process now" in capsys.readouterr().err
    assert looked_at == []


def test_when_no_means_works_each_reason_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> Stacks:
        raise NoStacks("py-spy is not installed; and process 4000 is stopped")

    monkeypatch.setattr(stacks, "stacks_of", fail)
    with FakePool(steady(document())) as pool:
        assert run(pool, "0", "--json") == Exit.FAILED

    assert json.loads(capsys.readouterr().out)["error"] == {
        "code": "no_stacks", "message": "worker 0: py-spy is not installed; and process 4000 is stopped",
    }  # fmt: skip


def test_without_a_pool_it_says_so() -> None:
    assert main(["stacks", "--supervisor", "--runtime-dir", "/nowhere"]) == Exit.UNREACHABLE
