"""From a batch that ran to answers: postprocess, put rows back together, encode.

A `many` request is answered when its last row is there, or at its first row that failed; then its other rows need not run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpupool.errors import ErrorCode
from gpupool.link import Marks, Result, pack_results
from gpupool.samples import SampleError, pack_body

from .batch import Batch
from .faults import Failure, read_fault
from .models import Model
from .request import Part, Request


@dataclass(frozen=True, slots=True)
class Done:
    """A batch that ran. `outputs` has one entry per row, a Failure where there is no result. Instants in monotonic seconds."""

    batch: Batch
    outputs: Sequence[Any]
    started_at: float
    forward_s: float
    number: int = 0  # among the batches of this worker


def refusal(ticket: int, failure: Failure, *, preprocess_s: float = 0.0, started: bool = False) -> Result:
    """Answer a request whose forward never began; `started` where its preprocess did."""
    return Result(ticket, failure.code, failure.message, failure.field, preprocess_s=preprocess_s, started=started)


def end(request: Request, failure: Failure) -> Result:
    """Answer a request that ends without all of its rows."""
    request.failure = failure
    return _result(request, ())


def empty(request: Request) -> Result:
    """Answer a `many` request of no samples."""
    return _result(request, (pack_body([])[0],))


def packed(results: Sequence[Result], unfit: Callable[[Result, Exception], None]) -> list[bytes]:
    """Encode answers as one message. One that cannot be is answered `internal`, after telling `unfit`: it costs no other its own."""
    try:
        return pack_results(results)
    except Exception:
        return pack_results([_fit(result, unfit) for result in results])


def _fit(result: Result, unfit: Callable[[Result, Exception], None]) -> Result:
    try:
        pack_results([result])
    except Exception as e:
        unfit(result, e)
        words = f"the worker's answer cannot be sent: {type(e).__name__}"
        return Result(result.ticket, ErrorCode.INTERNAL, words, started=bool(result.started))
    return result


class Replies:
    """Makes the answers of a worker's models.

    Args:
        models: loaded models by number.
        clock: monotonic seconds.
        beside: told of the ticket whose results the model's code gets, and 0 after it.
        relieve: makes room when a postprocess has failed.
        hungry: told of each result for which there was too little memory.
    """

    def __init__(
        self,
        models: Sequence[Model],
        clock: Callable[[], float] = time.monotonic,
        beside: Callable[[int], None] = lambda _: None,
        relieve: Callable[[], None] = lambda: None,
        hungry: Callable[[], None] = lambda: None,
    ) -> None:
        self._beside = beside
        self._relieve = relieve
        self._hungry = hungry
        self._models = models
        self._clock = clock

    def of(self, done: Done) -> list[Result]:
        """Return an answer for each request that this batch has completed or failed."""
        results: list[Result] = []
        at = 0
        began = self._clock()
        model = self._models[done.batch.key[0]]
        for item, start, stop in done.batch.shares:
            part: Part = item.owner
            outputs = done.outputs[at : at + stop - start]
            at += stop - start
            request = part.request
            if request.answered:
                continue
            request.started = True
            if not request.batch_size:  # its first
                request.forward_at = done.started_at
                request.queue_s = max(0.0, done.started_at - request.arrived - request.preprocess_s)
            request.forward_s += done.forward_s
            request.batch_size = max(request.batch_size, done.batch.rows)
            if model.postprocess is not None:
                self._beside(request.ticket)
            hungry = self._take_in(request, part, start, outputs, model)
            if model.postprocess is not None:
                self._beside(0)
            if hungry:
                self._hungry()
            ended = request.failure is not None or not request.missing
            frames = self._encode(request) if ended and request.failure is None else ()
            now = self._clock()
            request.postprocess_s += now - began
            if ended and request.traced:
                request.marks = _marks(request, done, began, now)
            began = now
            if ended:
                results.append(_result(request, frames))
        return results

    def _take_in(self, request: Request, part: Part, start: int, outputs: Sequence[Any], model: Model) -> bool:
        """Put outputs into their places, up to the first failure; True when postprocess failed for want of memory."""
        postprocess = model.postprocess
        hungry = False
        rows = part.rows(start, start + len(outputs))
        for row, output in zip(rows, outputs, strict=True):
            value = output
            if type(value) is Failure:
                request.failure = value
            elif postprocess is not None:
                try:
                    value = postprocess(value)
                except BaseException as e:  # the border to the user's model
                    self._relieve()
                    request.failure = read_fault(e).failure
                    hungry = request.failure.code is ErrorCode.OUT_OF_MEMORY
            if request.failure is not None:
                request.failure = request.failure.in_row(row) if request.many else request.failure
                break
            request.outputs[row] = value
            request.missing -= 1
        return hungry

    def _encode(self, request: Request) -> Sequence[bytes]:
        try:
            body, buffers = pack_body(request.outputs if request.many else request.outputs[0])
        except SampleError as e:
            words = str(e)
        except BaseException as e:  # objects of the model's own may raise from their methods
            words = read_fault(e).failure.message
        else:
            return (body, *buffers)
        request.failure = Failure(ErrorCode.MODEL_ERROR, f"the model's result cannot be sent: {words}")
        return ()


def _marks(request: Request, done: Done, postprocess_at: float, now: float) -> Marks:
    batch = done.batch
    return Marks(
        request.arrived, request.preprocess_from if request.preprocess_from < math.inf else 0.0, request.forward_at,
        done.started_at + done.forward_s, postprocess_at, now, done.number, done.started_at, batch.rows, batch.key[1], str(batch.reason),
    )  # fmt: skip


def _result(request: Request, frames: Sequence[bytes]) -> Result:
    request.answered = True
    failure = request.failure
    request.outputs = []
    return Result(
        request.ticket, "ok" if failure is None else failure.code, "" if failure is None else failure.message,
        "" if failure is None else failure.field, request.batch_size, request.length, request.queue_s, request.preprocess_s,
        request.forward_s, request.postprocess_s, request.started, frames, request.marks,
    )  # fmt: skip
