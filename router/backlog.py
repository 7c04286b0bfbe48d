"""The requests that wait in the router: by priority with ageing, then by arrival.

A request gains one step of priority for every `ageing_s` that it waits. All age at the same rate, so who comes first never
changes while they wait: it is the smaller of `arrived - priority * ageing_s`. Within one priority that is the order of arrival;
hence ten ordered lanes, whose heads are compared when one is taken. Adding and removing cost O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from .requests import Request

PRIORITIES: Final = 10
AGEING_S: Final = 1.0


class Backlog:
    """Pending requests. It keeps count; who asks for more than the bounds allow is the core's business."""

    def __init__(self, *, ageing_s: float = AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._lanes: list[OrderedDict[int, Request]] = [OrderedDict() for _ in range(PRIORITIES)]
        self._count = 0
        self.size_bytes = 0
        self.rows = 0
        self._rows_of = [0] * PRIORITIES

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return (request for lane in reversed(self._lanes) for request in lane.values())

    def push(self, request: Request) -> None:
        """Add a request that has just arrived."""
        self._lanes[request.priority][request.sequence] = request
        self._count += 1
        self.size_bytes += request.size
        self.rows += request.rows
        self._rows_of[request.priority] += request.rows

    def restore(self, requests: Iterable[Request]) -> None:
        """Put back requests that had been taken, before all that wait in their lanes, in their order of arrival."""
        for request in sorted(requests, key=lambda r: -r.sequence):
            self.push(request)
            self._lanes[request.priority].move_to_end(request.sequence, last=False)

    def remove(self, request: Request) -> None:
        """Take out a given request; KeyError when it does not wait here."""
        del self._lanes[request.priority][request.sequence]
        self._forget(request)

    def pop(self) -> Request:
        """Take the request whose turn it is; IndexError when none waits."""
        lanes = [lane for lane in self._lanes if lane]
        if not lanes:
            raise IndexError("backlog is empty")
        lane = lanes[0]
        if len(lanes) > 1:
            # On equal keys the higher priority, whose lane comes later: min() keeps the first of equals.
            lane = min(reversed(lanes), key=lambda lane: self._key(next(iter(lane.values()))))
        request = lane.popitem(last=False)[1]
        self._forget(request)
        return request

    def pop_last(self) -> Request:
        """Take the request whose turn would come last; IndexError when none waits."""
        lasts = [next(reversed(lane.values())) for lane in self._lanes if lane]
        if not lasts:
            raise IndexError("backlog is empty")
        last = max(lasts, key=lambda r: (self._key(r), r.sequence))
        self.remove(last)
        return last

    def rows_ahead(self, priority: int) -> int:
        """Rows that a newcomer of this priority finds before it, as far as priorities tell."""
        return sum(self._rows_of[priority:])

    def _key(self, request: Request) -> float:
        return request.arrived - request.priority * self._ageing_s

    def _forget(self, request: Request) -> None:
        self._count -= 1
        self.size_bytes -= request.size
        self.rows -= request.rows
        self._rows_of[request.priority] -= request.rows
