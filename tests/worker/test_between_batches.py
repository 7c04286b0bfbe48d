"""Between two batches. What waits while a snapshot keeps the work loop from its next batch: it is not cut, expires in time, and runs as soon as it may."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from gpupool.board import Board
from gpupool.spec import BatchingSpec
from gpupool.worker.backlog import Backlog
from gpupool.worker.batch import Batch, Item
from gpupool.worker.batcher import Batcher
from gpupool.worker.ceiling import Ceilings
from gpupool.worker.record import Record

SOON = 20.0


class Owner:
    def samples(self, start: int, stop: int) -> list[Any]:
        return list(range(start, stop))


def item(ticket: int, seconds: float = 100.0) -> Item:
    return Item(ticket, (0, 0), time.monotonic() + seconds, owner=Owner())


class WorkLoop:
    """A backlog, and the loop that takes from it: each batch runs until it is let go."""

    def __init__(self) -> None:
        policies = [BatchingSpec(adaptive=False, window_ms=0.0, min_batch=1)]
        self.backlog = Backlog(Batcher(policies, Ceilings()), Record(Board.create(1), 0))
        self.expired = threading.Event()
        self.backlog.tell_expired = self.expired.set
        self.cut: list[list[int]] = []
        self.runs, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while (taken := self.backlog.next_batch()) is not None:
            batch: Batch = taken[0]
            self.cut.append(list(batch.tickets))
            self.runs.release()
            self.may_end.acquire()
            self.backlog.ran(batch, time.monotonic(), 0.0, clean=True)

    def add(self, *items: Item) -> None:
        self.backlog.add(items, undecoded=0)

    def end(self) -> list[list[int]]:
        """Let all that is there run, and the loop end; return the batches that there were."""
        self.backlog.close()
        self.may_end.release(100)
        self.thread.join(SOON)
        assert not self.thread.is_alive()
        return self.cut


def tickets(items: Sequence[Item]) -> list[int]:
    return [i.ticket for i in items]


def test_what_comes_meanwhile_is_not_cut_and_runs_afterwards() -> None:
    loop = WorkLoop()
    with loop.backlog.between_batches(SOON) as at_rest:
        assert at_rest
        loop.add(item(1))
        assert not loop.runs.acquire(timeout=0.2)
        assert loop.backlog.rows == 1

    assert loop.runs.acquire(timeout=SOON)
    assert loop.end() == [[1]]


def test_what_is_past_its_deadline_meanwhile_is_told_and_never_run() -> None:
    loop = WorkLoop()
    with loop.backlog.between_batches(SOON):
        loop.add(item(1, seconds=0.05), item(2))
        assert loop.expired.wait(SOON)
        assert tickets(loop.backlog.expire()) == [1]

    assert loop.runs.acquire(timeout=SOON)
    assert loop.end() == [[2]]


def test_what_is_cancelled_meanwhile_never_runs() -> None:
    loop = WorkLoop()
    with loop.backlog.between_batches(SOON):
        loop.add(item(1), item(2))
        assert tickets(loop.backlog.cancel(1)) == [1]

    assert loop.runs.acquire(timeout=SOON)
    assert loop.end() == [[2]]


def test_the_running_batch_is_waited_for_and_no_other_begins_before() -> None:
    loop = WorkLoop()
    loop.add(item(1))
    assert loop.runs.acquire(timeout=SOON)
    loop.add(item(2))
    threading.Timer(0.1, loop.may_end.release).start()

    with loop.backlog.between_batches(SOON) as at_rest:
        assert at_rest
        assert loop.cut == [[1]]

    assert loop.runs.acquire(timeout=SOON)
    assert loop.end() == [[1], [2]]


def test_it_is_quiet_when_nothing_runs_and_nothing_waits() -> None:
    loop = WorkLoop()
    with loop.backlog.between_batches(SOON):
        assert loop.backlog.quiet
        loop.backlog.add([], undecoded=1)
        assert not loop.backlog.quiet
        loop.add(item(1))
        assert not loop.backlog.quiet

    assert loop.runs.acquire(timeout=SOON)
    assert not loop.backlog.quiet
    assert loop.end() == [[1]]


def test_a_batch_that_does_not_end_is_not_waited_for_for_ever() -> None:
    loop = WorkLoop()
    loop.add(item(1))
    assert loop.runs.acquire(timeout=SOON)

    with loop.backlog.between_batches(0.01) as at_rest:
        assert not at_rest

    loop.add(item(2))
    loop.may_end.release()
    assert loop.runs.acquire(timeout=SOON)
    assert loop.end() == [[1], [2]]
