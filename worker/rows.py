"""A few rows of one request, on their way through the model's `length` and `preprocess` in whichever thread has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpupool.errors import ErrorCode

from .faults import Failure, Fault, FaultKind, StickyFault, read_fault
from .models import Model
from .request import Request

#: So many rows at a time: then the others that wait have their turn.
ROWS_AT_A_TIME: Final = 32
_MAX_LENGTH: Final = 1 << 40  # what a length() returns need not fit into the link's integers
#: For an out-of-memory error that cannot even be read: made while there is memory.
_TOO_FULL_TO_SAY: Final = Fault(
    FaultKind.OUT_OF_MEMORY, Failure(ErrorCode.OUT_OF_MEMORY, "out of memory"), "MemoryError", "somewhere in preprocess"
)


class Rows:
    """Rows `start` to `stop` of a request. Prepared samples take the places of those that came; nobody else touches these meanwhile.

    Attributes:
        row_began: since when the model's code has had the present row, in monotonic seconds; 0 before the first and after the last.
    """

    __slots__ = ("began", "ended", "failed_at", "failure", "lengths", "request", "row_began", "start", "stop")

    def __init__(self, request: Request, start: int, stop: int) -> None:
        self.request = request
        self.start, self.stop = start, stop
        self.lengths: list[int] = []
        self.failure: Failure | None = None
        self.failed_at = 0
        self.began = self.ended = self.row_began = 0.0

    def work(self, model: Model, clock: Callable[[], float], relieve: Callable[[], None] = lambda: None) -> None:
        """Measure and preprocess them, up to the first that fails. `relieve` makes room as soon as one has.

        Raises:
            StickyFault: after this the device is of no more use.
        """
        length_of, preprocess, samples = model.length, model.preprocess, self.request.samples
        self.began = self.row_began = clock()
        at = self.start
        try:
            for at in range(self.start, self.stop):
                if length_of is not None:
                    self.lengths.append(min(int(length_of(samples[at])), _MAX_LENGTH))
                if preprocess is not None:
                    samples[at] = preprocess(samples[at])
                self.row_began = clock()
        except BaseException as e:  # the border to the user's model; SystemExit must not end the worker either
            relieve()
            try:
                fault = read_fault(e)
            except MemoryError:  # its frames still hold everything
                fault = _TOO_FULL_TO_SAY
            if fault.kind is FaultKind.STICKY:
                raise StickyFault(f"{fault.error} at {fault.where}, in preprocess") from None
            self.failure, self.failed_at = fault.failure, at
        self.row_began, self.ended = 0.0, clock()

    def fold(self) -> None:
        """Note in the request what was found; of several rows that fail the first counts."""
        request = self.request
        request.preprocess_from = min(request.preprocess_from, self.began)
        # Several threads may have been at it, but it took no longer than it took.
        spent = request.preprocess_s + self.ended - self.began
        request.preprocess_s = min(spent, self.ended - request.preprocess_from)
        if self.failure is not None and (request.failure is None or self.failed_at < request.failed_at):
            request.failure = self.failure.in_row(self.failed_at) if request.many else self.failure
            request.failed_at = self.failed_at
        if not self.lengths:
            return
        request.length = max(request.length, *self.lengths)
        if request.bounds:
            if request.buckets is None:
                request.buckets = {}
            for at, length in enumerate(self.lengths, self.start):
                bound = next((b for b in request.bounds if length <= b), 0)
                request.buckets.setdefault(bound, []).append(at)
