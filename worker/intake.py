"""From work on the wire to items for the batcher: decode and measure, beside the inference thread, and have threads preprocess.

A model without preprocess is spared the way through another thread. A request of many rows is measured in slices, so that it delays no
other request's answer by more than a slice. What is wrong with one request is answered to that one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gpupool.errors import ErrorCode
from gpupool.link import Result, Work, WorkFlag
from gpupool.samples import SampleError, unpack_body
from gpupool.spec import BatchingSpec
from gpupool.wire import MAX_PRIORITY, MAX_ROWS

from .batch import Item
from .faults import Failure
from .models import Model
from .preparers import Preparers
from .replies import empty, refusal
from .request import Part, Request
from .rows import SLICE_S, Rows

#: Samples that may wait in one worker. The router keeps the queue far shorter; this holds should it ever not.
MAX_WAITING: Final = 2 * MAX_ROWS
_MANY: Final = int(WorkFlag.MANY)
_ALONE: Final = int(WorkFlag.ALONE)
_URGENT: Final = int(WorkFlag.URGENT)
_TRACED: Final = int(WorkFlag.TRACED)


class Intake:
    """Work that has arrived and is not yet in the batcher.

    Args:
        models: loaded models by number.
        policies: their batching settings now.
        preparers: the threads that preprocess.
        clock: monotonic seconds.
        beside: told of the ticket whose samples the model's code is about to get, and 0 after it.
        relieve: makes room when a length has failed.
        hungry: told of each sample whose length did not fit into memory.
    """

    def __init__(
        self,
        models: Sequence[Model],
        policies: Sequence[BatchingSpec],
        preparers: Preparers,
        clock: Callable[[], float] = time.monotonic,
        beside: Callable[[int], None] = lambda _: None,
        relieve: Callable[[], None] = lambda: None,
        hungry: Callable[[], None] = lambda: None,
    ) -> None:
        self._relieve = relieve
        self._hungry = hungry
        self._beside = beside
        self._models = models
        self._policies = policies
        self._preparers = preparers
        self._clock = clock
        self._waiting: deque[tuple[Work, int, float]] = deque()
        self._rows = 0  # in _waiting
        self._open: Request | None = None
        self._cancelled: list[int] = []

    def look_at(self) -> float:
        """Return when `advance` is to be called: monotonic seconds, 0 for at once, infinity for after the next thing that happens."""
        at_once = self._open is not None or self._waiting or self._cancelled
        return 0.0 if at_once else self._preparers.look_at()

    @property
    def threads(self) -> int:
        """How many threads preprocess for one model, at the most."""
        return self._preparers.threads

    @property
    def rows(self) -> int:
        """Samples not yet in the batcher, as the router counts them."""
        return self._rows + (len(self._open.samples) if self._open else 0) + self._preparers.rows

    def put(self, works: Sequence[Work], epoch: int, now: float, *, queued: int) -> list[Result]:
        """Take in one message's work; return answers to what is too much. `queued` samples are in the batcher already."""
        refused: list[Result] = []
        for work in works:
            waiting = queued + self.rows
            if waiting and waiting + work.rows > MAX_WAITING:
                words = f"{waiting} samples wait in this worker, the limit is {MAX_WAITING}"
                refused.append(refusal(work.ticket, Failure(ErrorCode.OVERLOADED, words)))
                continue
            self._waiting.append((work, epoch, now))
            self._rows += work.rows
        return refused

    def cancel(self, ticket: int) -> bool:
        """Drop a request that is still here, and have `advance` answer it; True if it was."""
        if self._preparers.cancel(ticket):
            return True
        if self._open is not None and self._open.ticket == ticket:
            self._open = None
        else:
            found = next((entry for entry in self._waiting if entry[0].ticket == ticket), None)
            if found is None:
                return False
            self._waiting.remove(found)
            self._rows -= found[0].rows
        self._cancelled.append(ticket)
        return True

    def untouched(self) -> list[int]:
        """Drop what was never begun, and return its tickets. Having been measured is no beginning."""
        tickets = self._preparers.untouched() + [work.ticket for work, _, _ in self._waiting]
        if self._open is not None:
            tickets.append(self._open.ticket)
        self._waiting.clear()
        self._rows = 0
        self._open = None
        return tickets

    def clear(self) -> None:
        """Drop everything: it came from a router that is no more."""
        self.untouched()
        self._preparers.clear()
        self._cancelled.clear()

    def advance(self) -> tuple[list[Item], list[Result]]:
        """Go on for one slice of time; return items for the batcher, and answers to what cannot go there.

        Raises:
            StickyFault: when preprocessing met an error after which the device is of no more use.
        """
        began = self._clock()
        items: list[Item] = []
        results = [refusal(ticket, Failure(ErrorCode.CANCELLED, "cancelled")) for ticket in self._cancelled]
        self._cancelled.clear()
        for request in self._preparers.collect():
            self._finish(request, items, results)
        while self._open is not None or self._waiting:
            if self._open is None:
                self._open = self._next(began, results)
            elif self._measure(self._open):
                request, self._open = self._open, None
                self._finish(request, items, results)
            if self._clock() > began + SLICE_S:
                break
        return items, results

    def _next(self, now: float, results: list[Result]) -> Request | None:
        """Decode what came next; None when that is answered, or with the threads."""
        work, epoch, arrived = self._waiting.popleft()
        self._rows -= work.rows
        request = self._decode(work, epoch, arrived, now)
        if isinstance(request, Result):
            results.append(request)
            return None
        if self._models[request.model].preprocess is not None and request.samples:
            self._preparers.put(request)
            return None
        return request

    def _measure(self, request: Request) -> bool:
        """Measure a few rows of a request, if its model does that; True when no more are to be measured."""
        model = self._models[request.model]
        if model.length is None:
            return True
        rows = Rows(request, now := self._clock())
        if rows.claim(now):
            self._beside(request.ticket)
            rows.work(model, self._clock, self._relieve)
            self._beside(0)
            if rows.hungry:
                self._hungry()
            rows.fold()
        if request.failure is None and request.deadline <= self._clock():
            request.failure = Failure(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the work began")
        return request.failure is not None or request.prepared == len(request.samples)

    def _finish(self, request: Request, items: list[Item], results: list[Result]) -> None:
        if request.failure is not None:
            results.append(refusal(request.ticket, request.failure, preprocess_s=request.preprocess_s, started=request.started))
        elif not request.samples:
            results.append(empty(request))
        else:
            items += _items(request)

    def _decode(self, work: Work, epoch: int, arrived: float, now: float) -> Request | Result:
        if not 0 <= work.model < len(self._models):
            return refusal(work.ticket, Failure(ErrorCode.INTERNAL, f"this worker has no model number {work.model}"))
        deadline = arrived + work.timeout_s
        if deadline <= now:
            return refusal(work.ticket, Failure(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the work began"))
        try:
            body = unpack_body(work.frames[0], work.frames[1:])
        except SampleError as e:
            return refusal(work.ticket, Failure(e.code, e.message, e.field))
        many = bool(work.flags & _MANY)
        if many and type(body) is not list:
            words = f"the body must be a list of samples, not {type(body).__name__}"
            return refusal(work.ticket, Failure(ErrorCode.BAD_REQUEST, words, "many"))
        samples = body if isinstance(body, list) and many else [body]
        rows = len(samples)
        priority = work.priority + 1 + MAX_PRIORITY if work.flags & _URGENT else work.priority
        return Request(
            work.ticket, epoch, work.model, many, bool(work.flags & _ALONE), priority, deadline, arrived, samples,
            self._policies[work.model].length_buckets,
            outputs=[None] * rows, missing=rows, traced=bool(work.flags & _TRACED),
        )  # fmt: skip


def _items(request: Request) -> list[Item]:
    def item(bucket: int, rows: int, part: Part) -> Item:
        key = (request.model, bucket)
        return Item(request.ticket, key, request.deadline, rows, request.priority, request.alone, part, begun=request.started)

    if request.buckets is None:
        return [item(0, len(request.samples), Part(request))]
    if len(request.buckets) == 1:
        return [item(next(iter(request.buckets)), len(request.samples), Part(request))]
    return [item(bucket, len(index), Part(request, sorted(index))) for bucket, index in sorted(request.buckets.items())]
