"""Which worker gets the next request.

The load of a worker is the larger of the router's own count and what the board reports: a reading is a moment old, it can miss
what was just sent and must never talk a worker empty. Its cost per sample comes from the board too, and is made tame first:
unknown becomes the mean of the others, nothing counts as cheaper than a quarter of the mean (a worker that fails fast looks
cheap), and differences below CLOSE are none, so that equal cards tie and take turns. A batch that runs for longer than its worker's
batches do adds what it is overdue: nobody can tell when it will end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

from .workers import Fleet, Worker

CLOSE: Final = 1.5
CHEAPEST: Final = 0.25
#: A cost counts for half of what it is above the cheapest after this time without a batch that confirms it.
HALF_LIFE_S: Final = 1.0
#: Readings beyond these are noise, not news.
MAX_SERVICE_S: Final = 3600.0
MAX_BATCH_LIMIT: Final = 65536


class Policy(StrEnum):
    """How to compare workers that have room."""

    SHORTEST_WAIT = "shortest_wait"
    SHORTEST_QUEUE = "shortest_queue"
    ROUND_ROBIN = "round_robin"


class Reading(NamedTuple):
    """What the board said of one slot."""

    slot: int
    incarnation: int
    rows: int
    batch_limit: int
    service_s: float
    running_s: float = 0.0  # how long its batch has been running
    full_row_s: float = 0.0  # what a sample would take in full batches by the worker's fit; 0: unknown


class Balance:
    """Chooses among workers with room; ties go to the one that waited longest for its turn."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._turn = 0
        self._heap: list[tuple[float, int, int, Worker]] = []

    def begin(self, workers: Iterable[Worker]) -> None:
        """Begin a round of choices among these workers."""
        self._heap = [(self._score(w), w.turn, w.slot, w) for w in workers if w.has_room]
        heapify(self._heap)

    def best(self) -> Worker | None:
        """Return the worker to give the next request to; None when none has room."""
        return self._heap[0][3] if self._heap else None

    def given(self, worker: Worker) -> None:
        """Note that the worker named by `best` was given a request."""
        self._turn += 1
        worker.turn = self._turn
        if worker.has_room:
            heapreplace(self._heap, (self._score(worker), worker.turn, worker.slot, worker))
        else:
            heappop(self._heap)

    def choose(self, workers: Iterable[Worker]) -> Worker | None:
        """Return the best of these, whatever room they have; None of none."""
        return min(workers, key=lambda w: (self._score(w), w.turn, w.slot), default=None)

    def _score(self, worker: Worker) -> float:
        if self.policy is Policy.ROUND_ROBIN:
            return 0.0
        load = max(worker.rows, worker.reported)
        if self.policy is Policy.SHORTEST_QUEUE:
            return load
        return (load + 1) * worker.service_s + worker.overdue_s


def apply_readings(fleet: Fleet, readings: Sequence[Reading], now: float) -> None:
    """Take over what the board says of the registered workers; another incarnation's record counts as unknown.

    A cost that no batch has confirmed for a while fades towards the cheapest: it is only renewed by being chosen, and one slow batch
    would else keep a worker idle for ever.
    """
    told = {r.slot: r for r in readings}
    known: dict[int, float] = {}
    for worker in fleet.by_slot.values():
        worker.reported, worker.overdue_s, worker.full_row_s = 0, 0.0, 0.0
        reading = told.get(worker.slot)
        if reading is None or reading.incarnation != worker.incarnation:
            continue
        if 0 < reading.batch_limit <= MAX_BATCH_LIMIT and reading.batch_limit != worker.batch_limit:
            fleet.set_limit(worker, reading.batch_limit)
        if 0.0 < reading.full_row_s <= MAX_SERVICE_S:
            worker.full_row_s = reading.full_row_s
        if reading.rows <= worker.rows + 4 * worker.batch_limit:
            worker.reported = reading.rows
        if CLOSE * worker.batch_s < reading.running_s <= MAX_SERVICE_S and worker.batch_s:
            worker.overdue_s = reading.running_s - worker.batch_s
        if 0.0 < reading.service_s <= MAX_SERVICE_S and not worker.overflow:
            known[worker.slot] = reading.service_s
    if known:
        cheapest = min(known.values())
        for worker in fleet.by_slot.values():
            if worker.slot in known:
                faded = 0.5 ** (max(0.0, now - worker.answered_at) / HALF_LIFE_S)
                known[worker.slot] = cheapest + (known[worker.slot] - cheapest) * faded
    costs = _tame(known)
    mean = sum(costs.values()) / len(costs) if costs else 1.0
    for worker in fleet.by_slot.values():
        worker.service_s = costs.get(worker.slot, mean)


def _tame(costs: dict[int, float]) -> dict[int, float]:
    if not costs:
        return {}
    floor = CHEAPEST * sum(costs.values()) / len(costs)
    lifted = {slot: max(cost, floor) for slot, cost in costs.items()}
    lowest = min(lifted.values())
    return {slot: lowest if cost < CLOSE * lowest else cost for slot, cost in lifted.items()}
