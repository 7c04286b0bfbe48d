"""One tenant's waiting requests, in its own order: by priority with ageing, then by arrival.

A request gains one step of priority for every `ageing_s` that it waits. All age at the same rate, so who comes first never changes
while they wait: it is the smaller of `arrived - priority * ageing_s`. Within one priority that is the order of arrival; hence a queue
for each, whose heads are compared. What is served next is kept, since it is asked for far more often than it changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .requests import Request
from .tenants import Tenant


class Flow:
    """The requests of one tenant. All operations are O(1)."""

    __slots__ = ("_ageing_s", "_queues", "head", "rows", "rows_of", "since", "tag", "tenant", "turn")

    def __init__(self, tenant: Tenant, ageing_s: float) -> None:
        self.tenant = tenant
        self.rows = 0
        self.rows_of: dict[int, int] = {}  # by priority
        self.head: Request | None = None  # what is served next
        # How the turns of its head's priority see it:
        self.turn = 0  # names its present entries there; 0: none
        self.tag = 0.0
        self.since = 0.0
        self._ageing_s = ageing_s
        self._queues: dict[int, OrderedDict[int, Request]] = {}

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for request in queue.values())

    def key(self, request: Request) -> float:
        """What orders requests; the smaller goes first."""
        return request.arrived - request.priority * self._ageing_s

    def push(self, request: Request, *, first: bool = False) -> bool:
        """Add a request, behind or before all of its priority; whether that changed the head."""
        priority = request.priority
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
        queue[request.sequence] = request
        if first:
            queue.move_to_end(request.sequence, last=False)
        self._count(request, request.rows or 1)
        head = self.head
        if head is None or (first and head.priority == priority) or self._precedes(request, head):
            self.head = request
            return True
        return False

    def remove(self, request: Request) -> bool:
        """Take out a request, KeyError when it is not here; whether that changed the head."""
        queue = self._queues[request.priority]
        del queue[request.sequence]
        if not queue:
            del self._queues[request.priority]
        self._count(request, -(request.rows or 1))
        if request is not self.head:
            return False
        heads = [next(iter(queue.values())) for queue in self._queues.values()]
        # On equal keys the higher priority.
        self.head = min(heads, key=lambda r: (self.key(r), -r.priority)) if len(heads) > 1 else heads[0] if heads else None
        return True

    def first_of(self, priority: int) -> Request | None:
        """Return what has waited longest of a priority."""
        queue = self._queues.get(priority)
        return next(iter(queue.values())) if queue else None

    def last(self) -> Request:
        """Return the request whose turn would come last; ValueError when none waits."""
        return max((next(reversed(queue.values())) for queue in self._queues.values()), key=lambda r: (self.key(r), r.sequence))

    def _precedes(self, request: Request, head: Request) -> bool:
        """Whether a newcomer goes before the head: those of one priority come in order."""
        if request.priority == head.priority:
            return False
        mine, its = self.key(request), self.key(head)
        return mine < its or (mine == its and request.priority > head.priority)

    def _count(self, request: Request, rows: int) -> None:
        self.rows += rows
        left = self.rows_of.get(request.priority, 0) + rows
        if left:
            self.rows_of[request.priority] = left
        else:
            del self.rows_of[request.priority]
