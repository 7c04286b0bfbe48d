"""Whose turn it is among the tenants whose next request has one priority.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each carries a tag, the virtual time at which its turn begins; the smallest goes
next, virtual time moves on to its tag, and its next tag is later by the samples that it was given. A tenant that comes back from
idleness begins at the present virtual time or where its last turn ended, whichever is later: it has saved nothing up, and got nothing
for nothing. Beside that it is known who was served least recently, for tenants of lower priority that must not wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from .flow import Flow


class Turns:
    """The tenants in turn; operations are O(log tenants). An entry counts only while it names its flow's present turn."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.count = 0
        self._virtual = 0.0
        self._last = 0
        self._by_tag: list[tuple[float, int, Flow]] = []
        self._by_since: list[tuple[float, int, Flow]] = []

    def add(self, flow: Flow) -> None:
        """Give a tenant its place, or the place that it has by now."""
        tags = flow.tenant.tags
        flow.tag = max(self._virtual, tags.get(self.priority, 0.0))
        head = flow.head
        flow.since = max(head.arrived if head is not None else 0.0, flow.tenant.served_at)
        self._last += 1
        flow.turn = self._last
        self.count += 1
        heappush(self._by_tag, (flow.tag, flow.turn, flow))
        heappush(self._by_since, (flow.since, flow.turn, flow))
        if len(self._by_since) > 2 * self.count + 64:
            self._sweep()

    def remove(self, flow: Flow) -> None:
        """Take a tenant's place away."""
        flow.turn = 0
        self.count -= 1

    def served(self, flow: Flow, rows: int) -> None:
        """Note what a tenant was given; its place goes with it."""
        self._virtual = max(self._virtual, flow.tag)
        flow.tenant.tags[self.priority] = flow.tag + rows
        self.remove(flow)

    def first(self) -> Flow:
        """The tenant whose turn it is; IndexError when there is none."""
        return self._top(self._by_tag)

    def in_turn(self, most: int) -> Iterator[Flow]:
        """The tenants in turn, no more than `most` entries of them; to be used up before anything changes."""
        heap = self._by_tag
        nearest = [(heap[0], 0)] if heap else []
        while nearest and most:
            (_, turn, flow), at = heappop(nearest)
            if turn == flow.turn:
                most -= 1
                yield flow
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(nearest, (heap[child], child))

    def least_recent(self) -> Flow:
        """The tenant that was served least recently, or has waited longest without; IndexError when there is none."""
        return self._top(self._by_since)

    def _top(self, heap: list[tuple[float, int, Flow]]) -> Flow:
        while heap[0][1] != heap[0][2].turn:
            heappop(heap)
        return heap[0][2]

    def _sweep(self) -> None:
        for heap in (self._by_tag, self._by_since):
            heap[:] = [entry for entry in heap if entry[1] == entry[2].turn]
            heapify(heap)
