"""The requests that wait in the router: by priority, then in fair turns among tenants, each tenant's own as `flow` orders them.

Tenants are ranked by the priority of what each would have served next. Among equals they take turns (see `turns`). A lower one goes
before a higher when it has not been served for so long that ageing makes up for the difference: a second counts as one step. What a
tenant's own flood makes its requests wait counts for nothing against others: a tenant that is being served is not starving.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from typing import Final

from gpupool.wire import MAX_PRIORITY

from .flow import Flow
from .requests import Request
from .tenants import Tenant
from .turns import Turns

AGEING_S: Final = 1.0


class Backlog:
    """Pending requests. It keeps count; who asks for more than the bounds allow is the core's business."""

    def __init__(self, *, ageing_s: float = AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._turns = [Turns(priority) for priority in range(MAX_PRIORITY + 1)]
        self._flows: dict[Tenant, Flow] = {}
        self._count = 0
        self.news = False  # what a tenant has next has changed; whoever looks at that resets it
        self.size_bytes = 0
        self.rows = 0
        self._rows_of = [0] * (MAX_PRIORITY + 1)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return (request for flow in self._flows.values() for request in flow)

    @property
    def tenants(self) -> Iterable[Tenant]:
        """Those that have something here."""
        return self._flows.keys()

    @property
    def tenant_count(self) -> int:
        """How many those are."""
        return len(self._flows)

    def push(self, request: Request) -> None:
        """Add a request that has just arrived."""
        self._push(request, first=False)

    def restore(self, requests: Iterable[Request]) -> None:
        """Put back requests that had been taken, before all of their tenants' own priority, in order; their turns are given back."""
        for request in sorted(requests, key=lambda r: -r.sequence):
            tags, priority = request.tenant.tags, request.priority
            if priority in tags:
                tags[priority] = max(0.0, tags[priority] - (request.rows or 1))
            self._push(request, first=True)

    def remove(self, request: Request) -> None:
        """Take out a given request; KeyError when it does not wait here."""
        flow = self._flows[request.tenant]
        before = flow.head
        if flow.remove(request):
            assert before is not None
            self._turns[before.priority].remove(flow)
            self._place(flow)
        self._forget(request)

    def head(self) -> Request:
        """Return the request whose turn it is; IndexError when none waits."""
        head = self._next().head
        assert head is not None
        return head

    def pop(self, now: float) -> Request:
        """Take the request whose turn it is; IndexError when none waits."""
        request = self.head()
        self.take(request, now)
        return request

    def heads(self, most: int) -> Iterator[Request]:
        """The request whose turn it is, then the next ones of other tenants of its priority, in turn; to be used up before anything changes."""
        first = self._next()
        assert first.head is not None
        yield first.head
        for flow in self._turns_of(first).in_turn(most):
            if flow is not first and flow.head is not None:
                yield flow.head

    def take(self, request: Request, now: float) -> None:
        """Take what `head` or `heads` named."""
        flow = self._flows[request.tenant]
        turns = self._turns_of(flow)
        flow.remove(request)
        flow.tenant.served_at = now
        turns.served(flow, request.rows or 1)
        self._place(flow)
        self._forget(request)

    def last_of(self, tenant: Tenant) -> Request:
        """Return the request of a tenant whose turn would come last; KeyError when it has none."""
        return self._flows[tenant].last()

    def least_important(self) -> Iterator[Request]:
        """All requests, those of the lowest priority first, of that the longest waiting; to be used up before anything changes."""
        for priority in range(MAX_PRIORITY + 1):
            queues = [flow.waiting(priority) for flow in self._flows.values() if priority in flow.rows_of]
            yield from merge(*queues, key=lambda request: request.arrived)

    def waited_s(self, tenant: Tenant, priority: int, now: float) -> float:
        """Return how long the next request of a tenant and priority has waited; 0 when there is none."""
        flow = self._flows.get(tenant)
        first = flow.first_of(priority) if flow is not None else None
        return 0.0 if first is None else now - first.arrived

    def rows_ahead(self, tenant: Tenant, priority: int) -> int:
        """Rows that a newcomer would find before it at the least: its tenant's own, and as many of each other's as turns allow."""
        flow = self._flows.get(tenant)
        own = sum(rows for p, rows in flow.rows_of.items() if p >= priority) if flow is not None else 0
        others = sum(turns.count for turns in self._turns[priority:])
        if flow is not None and flow.head is not None and flow.head.priority >= priority:
            others -= 1
        return min(sum(self._rows_of[priority:]), own + (own + 1) * others)

    def _turns_of(self, flow: Flow) -> Turns:
        assert flow.head is not None
        return self._turns[flow.head.priority]

    def _next(self) -> Flow:
        """The tenant whose turn it is; IndexError when there is none."""
        listed = [turns for turns in self._turns if turns.count]
        if not listed:
            raise IndexError("backlog is empty")
        highest = listed[-1]
        if len(listed) == 1:
            return highest.first()
        # On equal keys the higher priority, which comes later: min() keeps the first of equals.
        starving = min(reversed(listed), key=self._starved)
        return highest.first() if starving is highest else starving.least_recent()

    def _starved(self, turns: Turns) -> float:
        return turns.least_recent().since - turns.priority * self._ageing_s

    def _push(self, request: Request, *, first: bool) -> None:
        tenant = request.tenant
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = Flow(tenant, self._ageing_s)
        before = flow.head
        if flow.push(request, first=first):
            if before is not None:
                self._turns[before.priority].remove(flow)
            self._place(flow)
        self._count += 1
        self.size_bytes += request.size
        self.rows += request.rows
        self._rows_of[request.priority] += request.rows
        tenant.pending += 1
        tenant.size_bytes += request.size

    def _place(self, flow: Flow) -> None:
        """List a flow by its head, or forget it."""
        self.news = True
        if flow.head is None:
            del self._flows[flow.tenant]
        else:
            self._turns[flow.head.priority].add(flow)

    def _forget(self, request: Request) -> None:
        self._count -= 1
        self.size_bytes -= request.size
        self.rows -= request.rows
        self._rows_of[request.priority] -= request.rows
        tenant = request.tenant
        tenant.pending -= 1
        tenant.size_bytes -= request.size
