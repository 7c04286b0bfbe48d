"""A few rows of one request, on their way through the model's `length` and `preprocess` in whichever thread has them.

They are claimed one by one, each just before the model's code gets it: so a request that has ended meanwhile loses no more time, and
several threads share a request of few rows as well as one of many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpupool.errors import ErrorCode

from .faults import Failure, Fault, FaultKind, StickyFault, read_fault
from .models import Model
from .request import Request

#: So many rows at a time, and no more are begun after so long: then the others that wait have their turn.
ROWS_AT_A_TIME: Final = 32
SLICE_S: Final = 0.005
_MAX_LENGTH: Final = 1 << 40  # what a length() returns need not fit into the link's integers
#: For an out-of-memory error that cannot even be read: made while there is memory.
_TOO_FULL_TO_SAY: Final = Fault(
    FaultKind.OUT_OF_MEMORY, Failure(ErrorCode.OUT_OF_MEMORY, "out of memory"), "MemoryError", "somewhere in preprocess"
)


class Rows:
    """Rows of a request. Prepared samples take the places of those that came; nobody else touches these meanwhile.

    Attributes:
        index: which rows, in order.
        short: its last row did not fit into memory, in company: it is to be tried again alone.
        row_began: since when the model's code has had the present row, in monotonic seconds; 0 before the first and after the last.
    """

    __slots__ = ("began", "ended", "failed_at", "failure", "index", "lengths", "preprocessed", "request", "row_began", "short")

    def __init__(self, request: Request, now: float) -> None:
        self.request = request
        self.index: list[int] = []
        self.lengths: list[int] = []
        self.failure: Failure | None = None
        self.failed_at = 0
        self.preprocessed = False  # the model's preprocess has had one at least
        self.began = self.ended = now
        self.row_began = 0.0
        self.short = False

    def claim(self, now: float) -> bool:
        """Claim the request's next row; False when that has none left or has ended, or when it is the others' turn."""
        request = self.request
        if request.prepared == len(request.samples) or request.failure is not None or request.deadline <= now:
            return False
        if self.index and (len(self.index) >= ROWS_AT_A_TIME or now >= self.began + SLICE_S):
            return False
        self.index.append(request.prepared)
        request.prepared += 1
        return True

    def work(
        self,
        model: Model,
        clock: Callable[[], float],
        relieve: Callable[[], None] = lambda: None,
        claim: Callable[[float], bool] | None = None,
        *,
        alone: bool = True,
    ) -> None:
        """Measure and preprocess what is claimed and what can yet be, up to the first that fails.

        `relieve` makes room as soon as one has. `claim` is Rows.claim, with a lock around it where several threads have the request.
        Unless `alone`, one that fails for want of memory is only found `short`.

        Raises:
            StickyFault: after this the device is of no more use.
        """
        length_of, preprocess, samples = model.length, model.preprocess, self.request.samples
        claim = claim or self.claim
        self.row_began = clock()
        try:
            while True:
                at = self.index[-1]
                if length_of is not None:
                    self.lengths.append(min(int(length_of(samples[at])), _MAX_LENGTH))
                if preprocess is not None:
                    self.preprocessed = True
                    samples[at] = preprocess(samples[at])
                self.row_began = now = clock()
                if not claim(now):
                    break
        except BaseException as e:  # the border to the user's model; SystemExit must not end the worker either
            relieve()
            try:
                fault = read_fault(e)
            except MemoryError:  # its frames still hold everything
                fault = _TOO_FULL_TO_SAY
            if fault.kind is FaultKind.STICKY:
                raise StickyFault(f"{fault.error} at {fault.where}, in preprocess") from None
            self.short = fault.kind is FaultKind.OUT_OF_MEMORY and not alone
            if not self.short:
                self.failure, self.failed_at = fault.failure, self.index[-1]
        self.row_began, self.ended = 0.0, clock()

    def again(self, model: Model, clock: Callable[[], float], relieve: Callable[[], None]) -> None:
        """Try the row that fell short once more, now that no other thread has one.

        Raises:
            StickyFault: after this the device is of no more use.
        """
        self.short = False
        del self.lengths[len(self.index) - 1 :]
        self.work(model, clock, relieve, claim=lambda _: False)

    def forgo(self) -> None:
        """Try it no more: the request has ended meanwhile, or its deadline has passed."""
        self.short = False
        if self.request.failure is None:
            self.failure = Failure(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed in preprocess")
            self.failed_at = self.index[-1]

    @property
    def hungry(self) -> bool:
        """Whether a row has failed for want of memory, for good."""
        return self.failure is not None and self.failure.code is ErrorCode.OUT_OF_MEMORY

    def fold(self) -> None:
        """Note in the request what was found; of several rows that fail the first counts."""
        request = self.request
        request.started |= self.preprocessed
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
            for at, length in zip(self.index, self.lengths, strict=False):
                bound = next((b for b in request.bounds if length <= b), 0)
                request.buckets.setdefault(bound, []).append(at)
