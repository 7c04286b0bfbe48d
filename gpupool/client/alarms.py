"""When an open call must be looked at: one instant for each, the earliest first, at a cost that hardly grows with their number.

A heap of instants and ids. An instant that was put off or removed leaves its entry behind, which is passed over when it comes up, or swept
out when such entries outnumber the others: with week-long timeouts they would pile up. Ids, so that an entry keeps no ended call alive.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Final

#: Entries left behind that are never worth a sweep.
_FEW: Final = 64


class Alarms:
    """Instants in seconds on the caller's clock, by id."""

    def __init__(self) -> None:
        self._instants: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, call_id: str, at: float) -> None:
        """Put a call's instant, in the place of the one before."""
        if self._instants.get(call_id) != at:
            self._instants[call_id] = at
            heappush(self._heap, (at, call_id))
            self._sweep()

    def remove(self, call_id: str) -> None:
        """Forget a call; one that is not there is no error."""
        if self._instants.pop(call_id, None) is not None:
            self._sweep()

    def due(self, now: float) -> list[str]:
        """Take out the ids whose instants have come, in their order."""
        ids = []
        while self.next() <= now:
            _, call_id = heappop(self._heap)
            del self._instants[call_id]
            ids.append(call_id)
        return ids

    def next(self) -> float:
        """Return the earliest instant; infinite when there is none."""
        heap, instants = self._heap, self._instants
        while heap and instants.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._instants) + _FEW:
            self._heap = [(at, call_id) for call_id, at in self._instants.items()]
            heapify(self._heap)
