"""A timing wheel: which requests' deadlines have come, with O(1) removal so that an answered request is kept alive by nothing.

A deadline is rounded up to its bucket's end, never down: nobody is told "too late" early, and at most BUCKET_S late.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from .requests import Request

BUCKET_S: Final = 0.005


class Deadlines:
    """Sets of requests by bucket, and a heap of bucket numbers.

    A bucket that empties leaves its number behind in the heap; those are swept out when they outnumber the living, else requests
    with week-long timeouts would leave a number each behind.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, set[Request]] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, request: Request) -> None:
        """Watch a request's deadline."""
        number = int(request.deadline / BUCKET_S) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = {request}
            heappush(self._heap, number)
            if len(self._heap) > 2 * len(self._buckets) + 64:
                self._sweep()
        else:
            bucket.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request; one that is not watched is no error."""
        number = int(request.deadline / BUCKET_S) + 1
        if bucket := self._buckets.get(number):
            bucket.discard(request)
            if not bucket:
                del self._buckets[number]

    def expired(self, now: float) -> list[Request]:
        """Take out the requests whose deadlines have passed, the earliest bucket first."""
        due: list[Request] = []
        while self._heap and self._heap[0] * BUCKET_S <= now:
            due += sorted(self._buckets.pop(heappop(self._heap), ()), key=lambda r: r.deadline)
        return due

    def next(self) -> float | None:
        """When `expired` should be asked next."""
        while self._heap and self._heap[0] not in self._buckets:
            heappop(self._heap)
        return self._heap[0] * BUCKET_S if self._heap else None

    def _sweep(self) -> None:
        self._heap = list(self._buckets)
        heapify(self._heap)
