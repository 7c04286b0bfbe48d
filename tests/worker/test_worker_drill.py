"""A drilled hang begins where a hung model's would: in the next batch, at once when nothing waits, and without the backlog's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from gpupool.board import Board, Phase, SlotWord
from gpupool.spec import BatchingSpec
from gpupool.worker.backlog import Backlog
from gpupool.worker.batch import Item
from gpupool.worker.batcher import Batcher
from gpupool.worker.ceiling import Ceilings
from gpupool.worker.drill import hang
from gpupool.worker.record import Record


class Hung(Exception):
    """Instead of hanging."""


class Owner:
    def samples(self, start: int, stop: int) -> list[Any]:
        return list(range(start, stop))


def backlog_on(board: Board) -> Backlog:
    return Backlog(Batcher([BatchingSpec(adaptive=False, window_ms=0.0, min_batch=1)], Ceilings()), Record(board, 0))


def item(ticket: int) -> Item:
    return Item(ticket, (0, 0), time.monotonic() + 100.0, owner=Owner())


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], float]]:
    """What would have hung: tickets and deadline."""
    seen: list[tuple[list[int], float]] = []

    def note(_: Record, tickets: Sequence[int], timeout_s: float) -> NoReturn:
        seen.append((list(tickets), timeout_s))
        raise Hung

    monkeypatch.setattr("gpupool.worker.backlog.hang", note)
    return seen


def test_the_next_batch_hangs_with_its_requests_named(hangs: list[tuple[list[int], float]]) -> None:
    backlog = backlog_on(Board.create(1))
    backlog.add([item(7), item(8)], undecoded=0)
    backlog.drill(3.0)

    with pytest.raises(Hung):
        backlog.next_batch()

    assert hangs == [([7, 8], 3.0)]
    backlog.add([item(9)], undecoded=0)  # the lock is free: the link must not hang too
    assert backlog.rows == 1


def test_an_idle_worker_hangs_at_once_with_nobody_to_blame(hangs: list[tuple[list[int], float]]) -> None:
    backlog = backlog_on(Board.create(1))
    ended = threading.Event()

    def work() -> None:
        with pytest.raises(Hung):
            backlog.next_batch()
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    backlog.drill(3.0)

    assert ended.wait(5.0)
    thread.join()
    assert hangs == [([], 3.0)]


def test_without_an_order_nothing_hangs(hangs: list[tuple[list[int], float]]) -> None:
    backlog = backlog_on(Board.create(1))
    backlog.add([item(7)], undecoded=0)

    assert backlog.next_batch() is not None
    assert hangs == []


def test_a_hang_stands_on_the_board_as_a_batch_past_whose_deadline_it_will_be_ended() -> None:
    board = Board.create(1)
    now = time.monotonic()
    threading.Thread(target=hang, args=(Record(board, 0), [7], 3.0), daemon=True).start()

    while not board.get_slot(0, SlotWord.PHASE_DEADLINE_NS) and time.monotonic() < now + 5.0:
        time.sleep(0.001)

    record = board.read(0)
    assert record.phase == Phase.BATCH
    assert 3.0 <= record.phase_deadline_ns / 1e9 - now < 8.0
    assert board.running(0) == [7]
