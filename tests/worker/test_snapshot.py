"""Snapshots: what is written, when tracing is on, and that one at a time is taken."""

from __future__ import annotations

import json
import pickle
import queue
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpupool.logs import Log
from gpupool.worker.snapshot import Snapshots
from support.pretended_torch import PretendedTorch


class Bench:
    def __init__(self, card: Any = None, wait_s: float = 20.0) -> None:
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.batch_runs, self.held = threading.Lock(), False
        self.wait_s = wait_s
        log = SimpleNamespace(event=SimpleNamespace(info=lambda *_, **__: None, error=lambda *_, **__: None))
        self.snapshots = Snapshots(
            lambda: {"worker": 3}, lambda: card, self.between_batches, self.answers.put, cast("Log", log)
        )

    @contextmanager
    def between_batches(self) -> Iterator[bool]:
        self.held = True
        at_rest = self.batch_runs.acquire(timeout=self.wait_s)
        try:
            yield at_rest
        finally:
            self.held = False
            if at_rest:
                self.batch_runs.release()

    def take(self, path: Path, seconds: float = 0.0) -> dict[str, Any]:
        self.snapshots.order(7, str(path), seconds)
        return self.answers.get(timeout=30)


def test_what_was_allocated_since_and_is_held_is_named_by_its_place(tmp_path: Path) -> None:
    bench, held = Bench(), []
    with bench.batch_runs:  # as a batch that runs would: the snapshot waits for its end
        bench.snapshots.order(7, str(tmp_path / "s.json"), 0.0)
        while not tracemalloc.is_tracing():
            pass
        held.append(bytes(3 << 20))
    answer = bench.answers.get(timeout=30)

    document = json.loads((tmp_path / "s.json").read_text())
    assert answer["n"] == 7
    assert answer["files"] == [str(tmp_path / "s.json")]
    assert document["worker"] == 3
    assert document["between_batches"]
    assert document["largest"][0]["bytes"] >= 3 << 20
    assert "test_snapshot.py" in document["largest"][0]["where"][-1] or "test_snapshot.py" in document["largest"][0]["where"][0]
    assert not tracemalloc.is_tracing()


def test_a_batch_that_does_not_end_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    bench = Bench(wait_s=0.01)
    with bench.batch_runs:
        answer = bench.take(tmp_path / "s.json")

    assert answer["between_batches"] is False


def test_one_at_a_time(tmp_path: Path) -> None:
    bench = Bench()
    with bench.batch_runs:
        bench.snapshots.order(1, str(tmp_path / "a"), 0.0)
        assert "another" in bench.take(tmp_path / "b")["error"]
    assert bench.answers.get(timeout=30)["n"] == 1
    assert "error" not in bench.take(tmp_path / "b")


def test_a_file_that_cannot_be_written_is_told_and_nothing_stays_on(tmp_path: Path) -> None:
    answer = Bench().take(tmp_path / "missing" / "s.json")

    assert answer["error"].startswith("FileNotFoundError")
    assert not tracemalloc.is_tracing()


def test_on_a_card_the_allocators_history_is_written_beside_it(tmp_path: Path) -> None:
    torch = PretendedTorch(total=1, free=1)

    answer = Bench(torch).take(tmp_path / "s.json")

    assert answer["files"] == [str(tmp_path / "s.json"), str(tmp_path / "s.json.pickle")]
    assert pickle.loads((tmp_path / "s.json.pickle").read_bytes()) == torch.memory.history
    assert not torch.memory.recording


def test_batches_wait_for_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(PretendedTorch(total=1, free=1))
    opened, open_ = [], Path.open

    def note(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append((path.name, bench.held))
        return open_(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", note)
    bench.take(tmp_path / "s.json")

    assert sorted(opened) == [("s.json.new", False), ("s.json.pickle.new", False)]
