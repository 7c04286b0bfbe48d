"""The largest batch that keeps a latency objective: raised by one step while full batches keep it, cut to three quarters when they do not.

Additive increase, multiplicative decrease, as TCP does it and Clipper (NSDI 2017) for batches. What counts is the time from a sample's
arrival in the worker to the end of its batch, so with one batch ahead about two batch times; what a request waits in the router under
overload no batch size would mend. Only full batches are judged: where they are not full the limit is not what makes them slow.

An objective that batches of one cannot keep would only cost throughput: then the limit goes back to the configured one, and says so.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from gpupool.spec import BatchingSpec

from .fit import BatchFit

#: Share of samples that may be later than the objective.
LATE: Final = 0.01
#: Samples and full batches after which a limit that kept the objective is raised.
EVIDENCE_ROWS: Final = 100
EVIDENCE_BATCHES: Final = 4
CUT: Final = 0.75
#: Full batches after a cut that do not count: their samples waited under the limit before.
_SETTLE: Final = 2
#: Steps from nothing to the configured limit.
_STEPS: Final = 32


class TuningState(StrEnum):
    """What the last judged batches led to."""

    RISING = "rising"
    HIGHEST = "highest"  # the objective is kept at max_batch
    CUT = "cut"
    UNREACHABLE = "unreachable"  # not even batches of one keep the objective: it is not acted on


class Tuning:
    """The limit of one model and bucket. Starts at min_batch."""

    __slots__ = (
        "_batches",
        "_late",
        "_most",
        "_objective_s",
        "_seen",
        "_settling",
        "_step",
        "cuts",
        "limit",
        "raises",
        "state",
    )

    def __init__(self, policy: BatchingSpec) -> None:
        self._objective_s = policy.p99_ms / 1000
        self._most = policy.max_batch
        self._step = max(1, policy.max_batch // _STEPS)
        self.limit = min(policy.min_batch, policy.max_batch)
        self.state = TuningState.RISING
        self.raises = self.cuts = 0
        self._settling = 0
        self._begin()

    def ran(self, rows: int, waited_s: list[float], limit: int, fit: BatchFit) -> None:
        """Judge a batch.

        Args:
            rows: its samples.
            waited_s: for each request in it, the time from arrival to the end of the batch.
            limit: the limit that was in force; below ours where memory or missing workers set it.
            fit: of batch times.
        """
        if fit.good and 2 * fit.predict(1) > self._objective_s:
            self.state, self.limit = TuningState.UNREACHABLE, self._most
            self._begin()
            return
        if self.state is TuningState.UNREACHABLE:
            self.state = TuningState.RISING
        if rows < limit:
            return
        if self._settling:
            self._settling -= 1
            return
        self._batches += 1
        self._seen += len(waited_s)
        self._late += sum(waited > self._objective_s for waited in waited_s)
        if self._late > max(1.0, LATE * max(self._seen, EVIDENCE_ROWS)):
            if min(rows, self.limit) > 1:
                self.limit = max(1, int(CUT * min(rows, self.limit)))
                self.cuts += 1
            self.state, self._settling = TuningState.CUT, _SETTLE
            self._begin()
        elif self._seen >= EVIDENCE_ROWS and self._batches >= EVIDENCE_BATCHES:
            if self.limit >= self._most:
                self.state = TuningState.HIGHEST
            elif rows >= self.limit:  # else something else held the batch below what we allow
                self.limit = min(self._most, self.limit + self._step)
                self.raises += 1
                self.state = TuningState.RISING
            self._begin()

    def _begin(self) -> None:
        self._seen = self._late = self._batches = 0

    def describe(self) -> dict[str, Any]:
        """Tell people."""
        return {
            "p99_ms": self._objective_s * 1000,
            "limit": self.limit,
            "state": str(self.state),
            "raises": self.raises,
            "cuts": self.cuts,
        }
