"""Whose rows are preprocessed next, and which requests are through with it: the deciding core, without clock or thread.

Requests of a model take turns, a few rows each, in the order of their arrival: a large one delays a small one by that much and no more.
A request of which a thread has rows is answered when the thread has let go of them, whatever ends it: as long as its ticket is out, the
router knows where its code may run, and blames nobody else for a death. Only what comes from a router that is no more, or goes back to
one at a stop, is forgotten at once.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque

from gpupool.errors import ErrorCode

from .faults import Failure
from .request import Request
from .rows import ROWS_AT_A_TIME, Rows


class Preparing:
    """All requests that are being preprocessed. Instants in monotonic seconds."""

    def __init__(self) -> None:
        self.rows = 0  # of all requests that are here
        self._requests: dict[int, Request] = {}  # by ticket
        self._waiting: defaultdict[int, deque[Request]] = defaultdict(deque)  # those with rows that no thread has had, by model
        self._through: dict[int, Request] = {}  # to be collected
        self.next_expiry = math.inf  # nothing expires before; perhaps later

    @property
    def through(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._through)

    def put(self, request: Request) -> None:
        """Take in a request of at least one sample."""
        self.rows += len(request.samples)
        self._requests[request.ticket] = request
        self._waiting[request.model].append(request)
        self.next_expiry = min(self.next_expiry, request.deadline)

    def waits(self, model: int) -> bool:
        """Say whether there is something to take."""
        return bool(self._waiting[model])

    def take(self, model: int, now: float) -> Rows | None:
        """Take the next rows of a model to a thread, which gives them back to `done`. What is past its deadline is not begun."""
        waiting = self._waiting[model]
        while waiting:
            request = waiting.popleft()
            if request.deadline <= now:  # `expire` answers it
                continue
            start = request.prepared
            request.prepared = min(start + ROWS_AT_A_TIME, len(request.samples))
            request.in_hand += 1
            if request.prepared < len(request.samples):
                waiting.append(request)
            return Rows(request, start, request.prepared)
        return None

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
                self._end(request, Failure(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the work began"))
        self.next_expiry = min((r.deadline for r in self._requests.values() if r.failure is None), default=math.inf)

    def collect(self) -> list[Request]:
        """Hand over the requests that are through, or have failed."""
        through, self._through = list(self._through.values()), {}
        for request in through:
            del self._requests[request.ticket]
            self.rows -= len(request.samples)
        if not self._requests:
            self.next_expiry = math.inf
        return through

    def clear(self) -> list[int]:
        """Forget everything; return its tickets. What threads have is dropped when they come back."""
        tickets = list(self._requests)
        self._requests.clear()
        self._waiting.clear()
        self._through.clear()
        self.rows = 0
        self.next_expiry = math.inf
        return tickets

    def _end(self, request: Request, failure: Failure) -> None:
        if request.failure is None:
            request.failure = failure
            self._give_up(request)

    def _give_up(self, request: Request) -> None:
        """Begin no more rows of a request, which is through as soon as no thread has any."""
        if request.prepared < len(request.samples):
            request.prepared = len(request.samples)
            waiting = self._waiting[request.model]
            if request in waiting:
                waiting.remove(request)
        if not request.in_hand:
            self._through[request.ticket] = request
