"""Whose rows are preprocessed next, and which requests are through with it: the deciding core, without clock or thread.

Requests of a model take turns, a few rows each: the highest priority first, and of equal ones in the order of their arrival. So a large
one delays a small one by a turn and no more.
A request of which a thread has rows is answered when the thread has let go of them, whatever ends it: as long as its ticket is out, the
router knows where its code may run, and blames nobody else for a death. A stop gives back only what no thread has had. What comes from a
router that is no more is forgotten at once: a thread may then still name its ticket, which no request of another router ever has.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict

from gpupool.errors import ErrorCode

from .faults import Failure
from .request import Request
from .rows import Rows


class Preparing:
    """All requests that are being preprocessed. Instants in monotonic seconds."""

    def __init__(self) -> None:
        self.rows = 0  # of all requests that are here
        self._requests: dict[int, Request] = {}  # by ticket
        self._waiting: defaultdict[int, list[Request]] = defaultdict(list)  # those with rows that no thread has had, by model
        self._through: dict[int, Request] = {}  # to be collected
        self._turn = 0
        self.next_expiry = math.inf  # nothing expires before; perhaps later

    @property
    def through(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._through)

    def put(self, request: Request) -> None:
        """Take in a request of at least one sample."""
        self.rows += len(request.samples)
        self._requests[request.ticket] = request
        self._queue(request)
        self.next_expiry = min(self.next_expiry, request.deadline)

    def waits(self, model: int) -> bool:
        """Say whether there is something to take."""
        return bool(self._waiting[model])

    def take(self, model: int, now: float) -> Rows | None:
        """Take the next row of a model to a thread, which may `claim` more and gives them back to `done`."""
        waiting = self._waiting[model]
        while waiting:
            request = waiting.pop(0)
            rows = Rows(request, now)
            if not rows.claim(now):  # past its deadline: `expire` answers it
                continue
            request.in_hand += 1
            if request.prepared < len(request.samples):
                self._queue(request)
            return rows
        return None

    def claim(self, rows: Rows, now: float) -> bool:
        """Let a thread have the next row of the request that it is at; False when it is to give back what it has had."""
        claimed = rows.claim(now)
        if claimed and rows.request.prepared == len(rows.request.samples):
            self._unqueue(rows.request)
        return claimed

    def done(self, rows: Rows) -> None:
        """Take rows back from a thread."""
        request = rows.request
        request.in_hand -= 1
        if self._requests.get(request.ticket) is not request:  # forgotten meanwhile
            return
        rows.fold()
        if request.failure is not None:
            self._give_up(request)
        elif not request.in_hand and request.prepared == len(request.samples):
            self._through[request.ticket] = request

    def cancel(self, ticket: int) -> bool:
        """End a request as cancelled; False when it is not here."""
        request = self._requests.get(ticket)
        if request is None:
            return False
        self._end(request, Failure(ErrorCode.CANCELLED, "cancelled"))
        return True

    def expire(self, now: float) -> None:
        """End what is past its deadline."""
        if now < self.next_expiry:
            return
        for request in list(self._requests.values()):
            if request.deadline <= now:
                when = "in preprocess" if request.prepared else "before the work began"
                self._end(request, Failure(ErrorCode.DEADLINE_EXCEEDED, f"the deadline passed {when}"))
        self.next_expiry = min((r.deadline for r in self._requests.values() if r.failure is None), default=math.inf)

    def collect(self) -> list[Request]:
        """Hand over the requests that are through, or have failed."""
        through, self._through = list(self._through.values()), {}
        for request in through:
            self._forget(request)
        return through

    def untouched(self) -> list[int]:
        """Forget the requests of which no row was begun, and return their tickets. The others are to be finished."""
        untouched = [request for request in self._requests.values() if not request.prepared]
        for request in untouched:
            self._unqueue(request)
            self._forget(request)
        return [request.ticket for request in untouched]

    def clear(self) -> None:
        """Forget everything. Threads begin no more rows of it, and what they have is dropped when it comes back."""
        for request in self._requests.values():
            request.failure = Failure(ErrorCode.CANCELLED, "its router is no more")
        self._requests.clear()
        self._waiting.clear()
        self._through.clear()
        self.rows = 0
        self.next_expiry = math.inf

    def _queue(self, request: Request) -> None:
        self._turn += 1
        request.turn = (-request.priority, self._turn)
        insort(self._waiting[request.model], request, key=lambda r: r.turn)

    def _unqueue(self, request: Request) -> None:
        waiting = self._waiting[request.model]
        if request in waiting:
            waiting.remove(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.ticket]
        self.rows -= len(request.samples)
        if not self._requests:
            self.next_expiry = math.inf

    def _end(self, request: Request, failure: Failure) -> None:
        if request.failure is None:
            request.failure = failure
            self._give_up(request)

    def _give_up(self, request: Request) -> None:
        """Begin no more rows of a request, which is through as soon as no thread has any."""
        if request.prepared < len(request.samples):
            request.prepared = len(request.samples)
            self._unqueue(request)
        if not request.in_hand:
            self._through[request.ticket] = request
