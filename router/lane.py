"""The waiting requests of one priority: tenants take turns by the samples they have had, each tenant's own in order of arrival.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a tenant's head carries a tag, the virtual time at which its turn begins; the
smallest goes next, virtual time moves to its tag, and the tenant's next tag is later by the samples that it was given. Who comes back
from idleness begins at the present virtual time: it has saved nothing up. One tenant alone: plain order of arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from .requests import Request
from .tenants import Tenant


class Flow:
    """One tenant's requests in one lane. An entry of the lane's heap counts only while it names the flow's present turn."""

    __slots__ = ("queue", "rows", "tag", "turn")

    def __init__(self, tag: float) -> None:
        self.queue: OrderedDict[int, Request] = OrderedDict()
        self.rows = 0
        self.tag = tag
        self.turn = 0


class Lane:
    """All operations are O(1) but those on the heap of tenants, which are O(log tenants)."""

    def __init__(self) -> None:
        self.requests: OrderedDict[int, Request] = OrderedDict()  # all of them by arrival
        self.rows = 0
        self.flows: dict[Tenant, Flow] = {}
        self._heap: list[tuple[float, int, Flow]] = []
        self._virtual = 0.0
        self._turn = 0

    def __bool__(self) -> bool:
        return bool(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    @property
    def oldest(self) -> Request:
        """The request that has waited longest; StopIteration when none waits."""
        return next(iter(self.requests.values()))

    def push(self, request: Request) -> None:
        """Add a request behind its tenant's others."""
        flow = self._flow(request.tenant)
        sequence = request.sequence
        self.requests[sequence] = flow.queue[sequence] = request
        rows = request.rows or 1
        flow.rows += rows
        self.rows += rows

    def restore(self, request: Request) -> None:
        """Put back a request that had been taken, before its tenant's others; the turn it cost is given back."""
        self.push(request)
        flow = self.flows[request.tenant]
        self.requests.move_to_end(request.sequence, last=False)
        flow.queue.move_to_end(request.sequence, last=False)
        flow.tag -= request.rows or 1
        self._list(flow)

    def head(self) -> Request:
        """The request whose turn it is; IndexError when none waits."""
        return next(iter(self._first().queue.values()))

    def pop(self) -> Request:
        """Take the request whose turn it is; IndexError when none waits."""
        flow = self._first()
        sequence, request = flow.queue.popitem(last=False)
        del self.requests[sequence]
        rows = request.rows or 1
        flow.rows -= rows
        self.rows -= rows
        self._virtual = flow.tag
        if flow.queue:
            flow.tag += rows
            self._turn += 1
            flow.turn = self._turn
            heapreplace(self._heap, (flow.tag, flow.turn, flow))
        else:
            heappop(self._heap)
            del self.flows[request.tenant]
        return request

    def remove(self, request: Request) -> None:
        """Take out a given request; KeyError when it does not wait here."""
        del self.requests[request.sequence]
        flow = self.flows[request.tenant]
        del flow.queue[request.sequence]
        rows = request.rows or 1
        flow.rows -= rows
        self.rows -= rows
        if not flow.queue:
            flow.turn = 0  # its entry in the heap is void
            del self.flows[request.tenant]
            if len(self._heap) > 2 * len(self.flows) + 64:
                self._heap = [(f.tag, f.turn, f) for f in self.flows.values()]
                heapify(self._heap)

    def _flow(self, tenant: Tenant) -> Flow:
        flow = self.flows.get(tenant)
        if flow is None:
            # Who has something at a worker has just had a turn.
            flow = self.flows[tenant] = Flow(self._virtual + (1.0 if tenant.outstanding else 0.0))
            self._list(flow)
        return flow

    def _list(self, flow: Flow) -> None:
        self._turn += 1
        flow.turn = self._turn
        heappush(self._heap, (flow.tag, flow.turn, flow))

    def _first(self) -> Flow:
        heap = self._heap
        while heap[0][1] != heap[0][2].turn:
            heappop(heap)
        return heap[0][2]
