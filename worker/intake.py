"""From work on the wire to items for the batcher: decode, measure, preprocess. Runs beside the inference thread.

A request of many rows is prepared in slices, so that it delays no other request's answer by more than a slice. What is wrong with one
request is answered to that one.
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
from .faults import Failure, FaultKind, StickyFault, read_fault
from .models import Model
from .replies import empty, refusal
from .request import Part, Request

#: How long preparing goes on before sockets and results get their turn.
SLICE_S: Final = 0.005
#: Samples that may wait in one worker. The router keeps the queue far shorter; this holds should it ever not.
MAX_WAITING: Final = 2 * MAX_ROWS
_ROWS_BETWEEN_LOOKS: Final = 32
_MAX_LENGTH: Final = 1 << 40  # what a length() returns need not fit into the link's integers
_MANY: Final = int(WorkFlag.MANY)
_ALONE: Final = int(WorkFlag.ALONE)
_URGENT: Final = int(WorkFlag.URGENT)


class Intake:
    """Work that has arrived and is not yet in the batcher.

    Args:
        models: loaded models by number.
        policies: their batching settings now.
        clock: monotonic seconds.
        beside: told of the ticket whose samples the model's code is about to get, and 0 after it.
    """

    def __init__(
        self,
        models: Sequence[Model],
        policies: Sequence[BatchingSpec],
        clock: Callable[[], float] = time.monotonic,
        beside: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._beside = beside
        self._models = models
        self._policies = policies
        self._clock = clock
        self._waiting: deque[tuple[Work, int, float]] = deque()
        self._rows = 0  # in _waiting
        self._open: Request | None = None

    @property
    def busy(self) -> bool:
        """Whether there is more to prepare."""
        return self._open is not None or bool(self._waiting)

    @property
    def rows(self) -> int:
        """Samples not yet in the batcher, as the router counts them."""
        return self._rows + (len(self._open.samples) if self._open else 0)

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
        """Drop a request that is still here; True if it was."""
        if self._open is not None and self._open.ticket == ticket:
            self._open = None
            return True
        found = next((entry for entry in self._waiting if entry[0].ticket == ticket), None)
        if found is not None:
            self._waiting.remove(found)
            self._rows -= found[0].rows
        return found is not None

    def clear(self) -> list[int]:
        """Drop everything; return its tickets."""
        tickets = [work.ticket for work, _, _ in self._waiting]
        if self._open is not None:
            tickets.append(self._open.ticket)
        self._waiting.clear()
        self._rows = 0
        self._open = None
        return tickets

    def advance(self) -> tuple[list[Item], list[Result]]:
        """Prepare for one slice of time; return items for the batcher, and answers to what cannot go there.

        Raises:
            StickyFault: when preprocessing met an error after which the device is of no more use.
        """
        until = self._clock() + SLICE_S
        items: list[Item] = []
        results: list[Result] = []
        while True:
            if self._open is None:
                if not self._waiting:
                    break
                work, epoch, arrived = self._waiting.popleft()
                self._rows -= work.rows
                opened = self._decode(work, epoch, arrived, until - SLICE_S)
                if isinstance(opened, Result):
                    results.append(opened)
                    continue
                self._open = opened
            request = self._open
            if not self._prepare(request, until):
                break
            self._open = None
            if request.failure is not None:
                results.append(refusal(request.ticket, request.failure, preprocess_s=request.preprocess_s))
            elif not request.samples:
                results.append(empty(request))
            else:
                items += _items(request)
            if self._clock() > until:
                break
        return items, results

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
            outputs=[None] * rows, missing=rows,
        )  # fmt: skip

    def _prepare(self, request: Request, until: float) -> bool:
        """Measure and preprocess rows until all are done (True) or the time is up (False)."""
        model = self._models[request.model]
        length_of, preprocess, bounds = model.length, model.preprocess, request.bounds
        if length_of is None and preprocess is None:
            return True
        began = self._clock()
        samples = request.samples
        at = request.prepared
        self._beside(request.ticket)
        try:
            for at in range(request.prepared, len(samples)):
                if length_of is not None:
                    length = min(int(length_of(samples[at])), _MAX_LENGTH)
                    request.length = max(request.length, length)
                    if bounds:
                        if request.buckets is None:
                            request.buckets = {}
                        bound = next((b for b in bounds if length <= b), 0)
                        request.buckets.setdefault(bound, []).append(at)
                if preprocess is not None:
                    samples[at] = preprocess(samples[at])
                if at % _ROWS_BETWEEN_LOOKS == _ROWS_BETWEEN_LOOKS - 1 and self._clock() > until:
                    request.prepared = at + 1
                    break
            else:
                request.prepared = len(samples)
        except BaseException as e:  # the border to the user's model; SystemExit must not end the worker either
            fault = read_fault(e)
            if fault.kind is FaultKind.STICKY:
                raise StickyFault(f"{fault.error} at {fault.where}, in preprocess") from None
            request.failure = fault.failure.in_row(at) if request.many else fault.failure
            request.prepared = len(samples)
        self._beside(0)
        request.preprocess_s += self._clock() - began
        return request.prepared == len(samples)


def _items(request: Request) -> list[Item]:
    def item(bucket: int, rows: int, part: Part) -> Item:
        key = (request.model, bucket)
        return Item(request.ticket, key, request.deadline, rows, request.priority, request.alone, part)

    if request.buckets is None:
        return [item(0, len(request.samples), Part(request))]
    if len(request.buckets) == 1:
        return [item(next(iter(request.buckets)), len(request.samples), Part(request))]
    return [item(bucket, len(index), Part(request, index)) for bucket, index in sorted(request.buckets.items())]
