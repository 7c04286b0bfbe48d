"""The requests that wait in the router: by priority with ageing, then fairly among tenants, then by arrival.

A request gains one step of priority for every `ageing_s` that it waits. All age at the same rate, so a lane's rank never changes while
its oldest waits: it is `arrived - priority * ageing_s`, and the smaller goes first. Hence ten lanes, whose oldest are compared when one
is taken; within a lane tenants take turns, see `lane`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from gpupool.wire import MAX_PRIORITY

from .lane import Lane
from .requests import Request
from .tenants import Tenant

AGEING_S: Final = 1.0


class Backlog:
    """Pending requests. It keeps count; who asks for more than the bounds allow is the core's business."""

    def __init__(self, *, ageing_s: float = AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._lanes = [Lane() for _ in range(MAX_PRIORITY + 1)]
        self._count = 0
        self.size_bytes = 0
        self.rows = 0
        self.tenants: dict[Tenant, None] = {}  # those that have something here

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return (request for lane in reversed(self._lanes) for request in lane)

    def push(self, request: Request) -> None:
        """Add a request that has just arrived."""
        self._lanes[request.priority].push(request)
        self._note(request)

    def restore(self, requests: Iterable[Request]) -> None:
        """Put back requests that had been taken, before all that wait in their lanes, in their order of arrival."""
        for request in sorted(requests, key=lambda r: -r.sequence):
            self._lanes[request.priority].restore(request)
            self._note(request)

    def remove(self, request: Request) -> None:
        """Take out a given request; KeyError when it does not wait here."""
        self._lanes[request.priority].remove(request)
        self._forget(request)

    def head(self) -> Request:
        """Return the request whose turn it is; IndexError when none waits."""
        return self._next_lane().head()

    def pop(self) -> Request:
        """Take the request whose turn it is; IndexError when none waits."""
        request = self._next_lane().pop()
        self._forget(request)
        return request

    def last_of(self, tenant: Tenant) -> Request:
        """Return the request of a tenant whose turn would come last; ValueError when it has none."""
        lasts = [next(reversed(flow.queue.values())) for lane in self._lanes if (flow := lane.flows.get(tenant))]
        return max(lasts, key=lambda r: (self._key(r), r.sequence))

    def waited_s(self, tenant: Tenant, priority: int, now: float) -> float:
        """Return how long the next request of a tenant and priority has waited; 0 when there is none."""
        flow = self._lanes[priority].flows.get(tenant)
        return 0.0 if flow is None else now - next(iter(flow.queue.values())).arrived

    def rows_ahead(self, tenant: Tenant, priority: int) -> int:
        """Rows that a newcomer would find before it, as far as priorities and fair turns tell: at the least its own tenant's."""
        ahead = 0
        for lane in self._lanes[priority:]:
            if lane:
                flow = lane.flows.get(tenant)
                own = flow.rows if flow else 0
                # Others get as much as its own tenant until its turn comes, unless they have less.
                ahead += min(lane.rows, own + (own + 1) * (len(lane.flows) - bool(flow)))
        return ahead

    def _next_lane(self) -> Lane:
        lanes = [lane for lane in self._lanes if lane.requests]
        if not lanes:
            raise IndexError("backlog is empty")
        if len(lanes) == 1:
            return lanes[0]
        # On equal keys the higher priority, whose lane comes later: min() keeps the first of equals.
        return min(reversed(lanes), key=lambda lane: self._key(lane.oldest))

    def _key(self, request: Request) -> float:
        return request.arrived - request.priority * self._ageing_s

    def _note(self, request: Request) -> None:
        self._count += 1
        self.size_bytes += request.size
        self.rows += request.rows
        tenant = request.tenant
        if not tenant.pending:
            self.tenants[tenant] = None
        tenant.pending += 1
        tenant.size_bytes += request.size

    def _forget(self, request: Request) -> None:
        self._count -= 1
        self.size_bytes -= request.size
        self.rows -= request.rows
        tenant = request.tenant
        tenant.pending -= 1
        tenant.size_bytes -= request.size
        if not tenant.pending:
            del self.tenants[tenant]
