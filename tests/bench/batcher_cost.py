"""What the worker's batching decisions cost without threads or sockets: microseconds a request by batch size and buckets.

One turn adds a batch's worth of requests and asks as link and work loop do: what has expired after each, then the batch, then when to look
again; and the batch has run. The same once more with the lock, the board and all else that stands around the core, each request in a
message of its own; there the buckets take turns by whole batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from gpupool.board import Board
from gpupool.spec import BatchingSpec
from gpupool.worker.backlog import Backlog
from gpupool.worker.batch import Item
from gpupool.worker.batcher import Batcher
from gpupool.worker.ceiling import Ceilings
from gpupool.worker.record import Record

_BATCHES: Final = (1, 8, 32)
_BUCKETS: Final = (0, 5)
_FAR: Final = 1e9


class Bench:
    """A batcher with so many buckets."""

    def __init__(self, batch: int, buckets: int) -> None:
        self.batch = batch
        self.bounds = tuple(16 << n for n in range(buckets)) or (0,)
        policy = BatchingSpec(max_batch=batch, min_batch=batch, length_buckets=() if self.bounds == (0,) else self.bounds)
        self.batcher = Batcher([policy], Ceilings())
        self.now, self.ticket = 1000.0, 0
        self.turns(200)

    def add(self) -> None:
        """One request; the buckets take turns, a batch's worth each."""
        self.ticket += 1
        bound = self.bounds[self.ticket // self.batch % len(self.bounds)]
        self.batcher.add(Item(self.ticket, (0, bound), _FAR), self.now)

    def turns(self, count: int) -> float:
        """Microseconds a request over so many turns."""
        batcher = self.batcher
        began = time.perf_counter()
        for _ in range(count):
            for _ in range(self.batch):
                self.now += 0.00001
                self.add()
                batcher.expire(self.now)
            while (batch := batcher.take(self.now)) is not None:
                self.now += 0.01
                batcher.ran(batch, 0.01, self.now)
            batcher.next_deadline()
            batcher.next_expiry()
            assert batcher.rows <= len(self.bounds) * self.batch
        return 1e6 * (time.perf_counter() - began) / (count * self.batch)


class Owner:
    """What an item belongs to."""

    def samples(self, start: int, stop: int) -> Sequence[Any]:
        """Its rows."""
        return (None,) * (stop - start)


class ShellBench(Bench):
    """The same behind the lock, with a board."""

    def turns(self, count: int) -> float:
        """Microseconds a request over so many turns."""
        board = Board.create(1)
        backlog, owner = Backlog(self.batcher, Record(board, 0), clock=lambda: self.now), Owner()
        began = time.perf_counter()
        for turn in range(count):
            bound = self.bounds[turn % len(self.bounds)]
            for _ in range(self.batch):
                self.now += 0.00001
                self.ticket += 1
                backlog.add([Item(self.ticket, (0, bound), _FAR, owner=owner)], undecoded=0)
                backlog.expire()
            taken = backlog.next_batch()
            assert taken
            self.now += 0.01
            backlog.ran(taken[0], self.now - 0.01, 0.01, clean=True)
            backlog.next_expiry()
        took = time.perf_counter() - began
        board.close()
        return 1e6 * took / (count * self.batch)


def batcher_cost(*, quick: bool) -> None:
    """Measure all shapes; each as the median of a few runs."""
    turns, runs = (300, 3) if quick else (2000, 5)
    for bench, what in ((Bench, "core alone"), (ShellBench, "core with lock and board")):
        print(f"## The batcher's {what}, us a request (added one by one, expiry asked after each)\n")
        print(f"| samples in a batch | {' | '.join(f'buckets: {b or 1}' for b in _BUCKETS)} |")
        print(f"| ---: |{' ---: |' * len(_BUCKETS)}")
        for size in _BATCHES:
            cells = [median(b.turns(max(20, turns // size)) for _ in range(runs)) for b in (bench(size, n) for n in _BUCKETS)]
            print(f"| {size} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)
        print()
