"""Requests that workers may die of: they run again one at a time in the whole pool, each alone on its worker.

Those are the ones that were running when a worker died, and those that came back from several workers that ended with nothing marked as
running, or left unasked: code of a model may run where nobody marks it.

So the next death has one author. One worker is reserved for them: it gets no other work, and the suspect is sent when what it
had before is done. Another slot than the one where the request saw a worker die is preferred, in case the card was at fault.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from .requests import Request
from .workers import Worker


class Suspects:
    """The queue of suspects, the one that runs, and the worker reserved for them."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self.running: Request | None = None
        self.reserved: Worker | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def add(self, requests: Iterable[Request]) -> None:
        """Queue suspects, the earliest arrived first."""
        for request in requests:
            self._waiting[request.sequence] = request
        self._waiting = OrderedDict(sorted(self._waiting.items()))

    def remove(self, request: Request) -> bool:
        """Take out a request; False when it does not wait here."""
        return self._waiting.pop(request.sequence, None) is not None

    def last(self) -> Request:
        """Return the one that arrived last; StopIteration when none waits."""
        return next(reversed(self._waiting.values()))

    def returned(self, request: Request) -> bool:
        """Note that a ticket came back: perhaps that of the suspect that ran, which had its worker to itself. True if so."""
        if request is not self.running:
            return False
        self.running = self.reserved = None
        return True

    def reserve(self, workers: Sequence[Worker]) -> None:
        """Choose the worker for the next suspect among those that may get work, or let it go when no suspect is left."""
        if self.running is not None:
            return
        if not self._waiting:
            self.reserved = None
            return
        request = next(iter(self._waiting.values()))
        others = [w for w in workers if w.slot != request.died_on] or workers
        if self.reserved not in others:
            self.reserved = min(others, key=lambda w: w.rows, default=None)

    def take(self) -> Request | None:
        """Take the next suspect when its worker has nothing else to do; the caller sends it to `reserved`."""
        if self.running is not None or self.reserved is None or self.reserved.outstanding or not self._waiting:
            return None
        self.running = self._waiting.popitem(last=False)[1]
        return self.running
