"""The workers that have registered: what each was sent and has not answered, and which of them may get work.

The supervisor speaks of slots (`hold`, `lost`), the link of peers; an incarnation once lost can never come back.
"""

from __future__ import annotations

from typing import Final

from gpupool.link import Hello

from .requests import Request

#: A worker just joined gets a quarter of a batch until its first result: if it dies of it, little was at stake.
SLOW_START: Final = 4


class Worker:
    """One registered incarnation. `rows` is the router's own count of samples sent and not answered."""

    __slots__ = (
        "answered_at", "batch_limit", "batch_rows", "batch_s", "failures", "full_row_s", "idle_told", "incarnation", "leaving", "outstanding", "overdue_s", "overflow", "peer", "preparing", "proven",
        "reported", "returned", "room", "room_bytes", "rows", "service_s", "sick", "size_bytes", "slot", "turn",
    )  # fmt: skip

    def __init__(self, peer: bytes, hello: Hello, *, overflow: bool = False) -> None:
        self.peer = peer
        self.overflow = overflow  # gets work under pressure only, see `overflow`
        self.slot = hello.slot
        self.incarnation = hello.incarnation
        self.batch_limit = max(1, hello.batch_limit)
        # One thread more or less is no matter beside a batch; several would have nothing to do before the batch that runs is answered.
        self.preparing = max(0, hello.threads - 1)
        self.outstanding: dict[int, Request] = {}  # by ticket, in the order sent
        self.rows = 0
        self.size_bytes = 0  # of the same
        self.room = 0  # rows up to which it gets more, see Fleet.set_limit
        self.room_bytes = 0  # and bytes
        self.proven = False  # has answered something
        self.leaving = False  # said BYE, or could not be reached: gets nothing more
        self.idle_told = False  # the supervisor knows that it has nothing left; matters while its slot is held
        self.returned: list[Request] = []  # given back when it left, for what may have been a reason
        self.sick = False  # reported for replacement
        self.failures = 0  # infrastructure errors in a row
        self.answered_at = 0.0  # when it last answered
        self.batch_s = 0.0  # smoothed duration of a batch, 0 until known
        self.batch_rows = 0.0  # smoothed size of the same
        self.full_row_s = 0.0  # what a sample would take in full batches, as the worker tells; 0 until it knows
        self.service_s = 1.0  # relative cost of a sample, see balance
        self.overdue_s = 0.0  # what its present batch has taken longer than usual
        self.reported = 0  # rows that the board shows
        self.turn = 0  # when it was last given something

    @property
    def has_room(self) -> bool:
        """Whether it may get one request more. An idle one always may, so that a large `many` request finds a place."""
        return (self.rows < self.room and self.size_bytes < self.room_bytes) or not self.outstanding

    @property
    def needs_s(self) -> float:
        """How long a request that it is given now will take at the least, half of a batch that runs included; 0 while unknown."""
        return self.batch_s * (1.5 if self.outstanding else 1.0)

    def can_take(self, rows: int) -> bool:
        """Whether it may get one request more although it may hold so many rows more than it has room for."""
        return self.rows < self.room + rows and self.size_bytes < self.room_bytes

    def give(self, request: Request) -> None:
        """Note that a request is sent."""
        rows = request.rows or 1
        self.outstanding[request.ticket] = request
        self.rows += rows
        self.size_bytes += request.size
        request.tenant.outstanding += rows

    def take_back(self, ticket: int) -> Request | None:
        """Note that a ticket is done with, and return its request; None for one that it does not have."""
        request = self.outstanding.pop(ticket, None)
        if request is not None:
            rows = request.rows or 1
            self.rows -= rows
            self.size_bytes -= request.size
            request.tenant.outstanding -= rows
        return request


class Fleet:
    """All registered workers, and the supervisor's holds on slots.

    Args:
        max_queue: samples that may wait in one worker.
        room_bytes: of bodies that one worker may hold.
    """

    def __init__(self, max_queue: int, room_bytes: int) -> None:
        self._max_queue = max_queue
        self._room_bytes = room_bytes
        self.by_peer: dict[bytes, Worker] = {}
        self.by_slot: dict[int, Worker] = {}
        self.held: set[int] = set()
        self.avoided: set[int] = set()  # slots whose worker is late
        self._lost: dict[int, int] = {}  # newest incarnation known to be dead, by slot
        self._usable: list[Worker] | None = None
        self._overflow: list[Worker] | None = None

    def is_lost(self, slot: int, incarnation: int) -> bool:
        """Whether this incarnation, or a newer one of its slot, is known to be dead."""
        return incarnation <= self._lost.get(slot, 0)

    def add(self, worker: Worker) -> None:
        """Register a worker; whoever had its slot must have been removed."""
        self.by_peer[worker.peer] = worker
        self.by_slot[worker.slot] = worker
        self.avoided.discard(worker.slot)
        worker.room_bytes = self._room_bytes
        self.set_limit(worker, worker.batch_limit)
        self.changed()

    def move(self, worker: Worker, peer: bytes) -> None:
        """Follow a worker to a new connection."""
        self.by_peer.pop(worker.peer, None)
        worker.peer = peer
        self.by_peer[peer] = worker

    def lose(self, slot: int, incarnation: int) -> Worker | None:
        """Bury an incarnation, and return its worker if it was registered."""
        self._lost[slot] = max(incarnation, self._lost.get(slot, 0))
        worker = self.by_slot.get(slot)
        if worker is None or worker.incarnation > incarnation:
            return None
        del self.by_slot[slot]
        self.by_peer.pop(worker.peer, None)
        self.changed()
        return worker

    def set_limit(self, worker: Worker, batch_limit: int) -> None:
        """Set how much a worker may hold: what runs, about one batch more and what several threads preprocess, less while it is unproved.

        One for overflow is slow: nothing waits there for its turn.
        """
        worker.batch_limit = batch_limit
        if worker.proven and worker.overflow:
            worker.room = batch_limit
        elif worker.proven:
            worker.room = min(2 * batch_limit + worker.preparing, batch_limit + self._max_queue)
        else:
            worker.room = max(1, batch_limit // SLOW_START)

    def set_max_queue(self, max_queue: int) -> None:
        """Change how many samples may wait in one worker."""
        self._max_queue = max_queue
        for worker in self.by_slot.values():
            self.set_limit(worker, worker.batch_limit)

    def changed(self) -> None:
        """Forget what `usable` and `overflow` found: a worker or a hold has changed."""
        self._usable = self._overflow = None

    @property
    def registered(self) -> list[Worker]:
        """Workers that are there and not on their way out, those for overflow left out."""
        return [w for w in self.by_slot.values() if not w.leaving and not w.overflow]

    @property
    def overflow(self) -> list[Worker]:
        """Workers for overflow that may get work. No need makes up for a hold or a missing beat."""
        if self._overflow is None:
            off = self.held | self.avoided
            self._overflow = [
                w for w in self.by_slot.values() if w.overflow and not w.leaving and not w.sick and w.slot not in off
            ]
        return self._overflow

    @property
    def all_held(self) -> bool:
        """Whether there are workers, and the supervisor holds every one of them."""
        registered = self.registered
        return bool(registered) and all(w.slot in self.held for w in registered)

    @property
    def usable(self) -> list[Worker]:
        """Workers that may get work: those on time and not held. When all are held: all, so that accepted work is finished.

        One that is late gets nothing, also when there is nobody else: what waits here can still run elsewhere, or be answered in time.
        """
        if self._usable is None:
            well = [w for w in self.registered if not w.sick and w.slot not in self.avoided]
            self._usable = well if self.all_held else [w for w in well if w.slot not in self.held]
        return self._usable
