"""What the batcher's shell publishes on the board, and what it counts between batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from gpupool.board import Board, SlotWord
from gpupool.link import Hello
from gpupool.router.balance import Reading, apply_readings
from gpupool.router.forecast import Forecast
from gpupool.router.workers import Fleet, Worker
from gpupool.spec import BatchingSpec
from gpupool.worker.backlog import Backlog
from gpupool.worker.batch import Batch, Item
from gpupool.worker.batcher import Batcher
from gpupool.worker.ceiling import Ceilings
from gpupool.worker.record import Record


class Owner:
    def samples(self, start: int, stop: int) -> Sequence[Any]:
        return range(start, stop)


class Stage:
    """A backlog on a real board, with a clock of ours and a device that takes 8 + n ms."""

    def __init__(self, board: Board, policy: BatchingSpec) -> None:
        self.board, self.now, self.ticket = board, 1000.0, 0
        self.backlog = Backlog(Batcher([policy], Ceilings()), Record(board, 0), clock=lambda: self.now)

    def add(self, count: int) -> None:
        self.ticket += count
        owner = Owner()
        items = [Item(self.ticket - n, (0, 0), 1e9, owner=owner) for n in range(count)]
        self.backlog.add(items, undecoded=0)

    def begin(self) -> Batch:
        taken = self.backlog.next_batch()
        assert taken
        return taken[0]

    def end(self, batch: Batch) -> None:
        began, seconds = self.now, 0.008 + 0.001 * batch.rows
        self.now += seconds
        self.backlog.ran(batch, began, seconds, clean=True)

    def word(self, word: SlotWord) -> int:
        return self.board.get_slot(0, word)


@pytest.fixture
def stage() -> Iterator[Stage]:
    board = Board.create(1)
    yield Stage(board, BatchingSpec(max_batch=32, min_batch=1, adaptive=False))
    board.close()


def test_the_board_tells_a_full_batch_by_the_fit_as_soon_as_that_is_good(stage: Stage) -> None:
    for n in range(7):
        stage.add(1 + n % 4)
        stage.end(stage.begin())
    assert stage.word(SlotWord.FULL_ROW_NS) == 0

    for n in range(20):
        stage.add(1 + n % 4)
        stage.end(stage.begin())

    assert stage.word(SlotWord.FULL_ROW_NS) / 1e9 == pytest.approx(0.040 / 32)
    assert stage.word(SlotWord.SERVICE_NS) / 1e9 == pytest.approx(0.0105 / 2.5, rel=0.2)


def test_shares_that_the_supervisor_sets_hold_for_the_next_batch_and_show(stage: Stage) -> None:
    stage.backlog.refresh()
    assert (stage.word(SlotWord.BATCH_LIMIT), stage.word(SlotWord.WINDOW_NS)) == (32, 5_000_000)
    stage.board.set_slot(0, SlotWord.SET_BATCH_PPM, 500_000)
    stage.board.set_slot(0, SlotWord.SET_WINDOW_PPM, 200_000)
    stage.add(40)

    assert stage.begin().rows == 16

    assert (stage.word(SlotWord.BATCH_LIMIT), stage.word(SlotWord.WINDOW_NS)) == (16, 1_000_000)


def shares(stage: Stage) -> None:
    stage.board.set_slot(0, SlotWord.SET_BATCH_PPM, 250_000)
    stage.backlog.refresh()


@pytest.mark.parametrize(
    "cut",
    [shares, lambda stage: stage.backlog.configure([BatchingSpec(max_batch=8, min_batch=1, adaptive=False)])],
    ids=["workers are lost", "a reload"],
)
def test_the_speed_on_the_board_does_not_fall_with_the_limit_before_a_batch_has_shown_it(
    stage: Stage, cut: Callable[[Stage], None]
) -> None:
    """Two words, read at any moment: the forecast took a new limit for what the old one's batches took, four times too slow."""

    def rows_per_s() -> float:
        forecast, fleet = Forecast(), Fleet(100, 1 << 20)
        fleet.add(worker := Worker(b"w", Hello(0, 1, 1, "", 32)))
        limit, full_row_s = stage.word(SlotWord.BATCH_LIMIT), stage.word(SlotWord.FULL_ROW_NS) / 1e9
        apply_readings(fleet, [Reading(0, 1, 0, limit, 0.001, full_row_s=full_row_s)], 0.0)
        forecast.update([worker])
        return forecast.rows_per_s

    for n in range(40):
        stage.add((16, 32)[n % 2])
        stage.end(stage.begin())
    assert rows_per_s() == pytest.approx(32 / 0.040, rel=0.01)

    cut(stage)

    assert stage.word(SlotWord.BATCH_LIMIT) == 8
    assert 8 / 0.016 <= rows_per_s() * 1.001
    for _ in range(60):
        stage.add(8)
        stage.end(stage.begin())
    assert rows_per_s() == pytest.approx(8 / 0.016, rel=0.01)


def test_only_pauses_before_a_full_batch_that_waited_count_as_ours(stage: Stage) -> None:
    stage.add(64)
    stage.end(stage.begin())
    stage.now += 0.001  # our own work
    stage.end(stage.begin())
    stage.now += 5.0  # nobody asks
    stage.add(32)
    stage.end(stage.begin())

    between = stage.backlog.report(["m"])["between_full"]

    assert (between["pairs"], between["gap_ms"]) == (1, pytest.approx(1.0))


def test_after_the_close_what_was_begun_waits_for_nobody(stage: Stage) -> None:
    """A clock that stands still would hold a window for ever: the batch must be due at once."""
    stage.backlog.configure([BatchingSpec(max_batch=32, min_batch=8, window_ms=60_000.0, adaptive=False)])
    begun = Item(1, (0, 0), 1e9, owner=Owner())
    begun.begun = True
    stage.backlog.add([begun], undecoded=0)

    assert stage.backlog.close() == []

    assert stage.begin().rows == 1
    stage.board.set_slot(0, SlotWord.SET_WINDOW_PPM, 200_000)
    stage.backlog.refresh()
    assert stage.word(SlotWord.WINDOW_NS) == 0
