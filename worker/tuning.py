"""The largest batch that keeps a latency objective: raised by one step while full batches keep it, cut to three quarters when they do not.

Additive increase, multiplicative decrease, as TCP does it and Clipper (NSDI 2017) for batches. What counts is the time from a sample's
arrival in the worker to the end of its batch, so with one batch ahead about two batch times; what a request waits in the router under
overload no batch size would mend. Only full batches are judged: where they are not full the limit is not what makes them slow.

Each try of a size that breaks the objective makes two batches late. So that the tries alone never use the objective up, the size that broke
it is remembered, and tried again only when so many samples have kept it since that those late ones are half of what is allowed. What one try
can make late is the most that is ever owed: a storm in which everything is late says nothing of what the next try will cost.

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
#: Late samples that one in time makes up for.
_REPAID: Final = LATE / 2
#: Full batches after a cut that do not count: their samples waited under the limit before.
_SETTLE: Final = 2
#: Steps from nothing to the configured limit.
_STEPS: Final = 32


class TuningState(StrEnum):
    """What the last judged batches led to."""

    RISING = "rising"
    HIGHEST = "highest"  # the objective is kept at max_batch
    SETTLED = "settled"  # one step more has broken the objective, and is not to be tried again yet
    CUT = "cut"
    UNREACHABLE = "unreachable"  # not even batches of one keep the objective: it is not acted on


class Tuning:
    """The limit of one model and bucket. Starts at min_batch."""

    __slots__ = (
        "_batches",
        "_broke",
        "_late",
        "_most",
        "_objective_s",
        "_owed",
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
        self._broke = 0  # the limit that last broke the objective; 0: none that is to be heeded
        self._owed = 0.0  # late samples that those in time have not made up for; none without a size that broke the objective
        self._begin()

    def ran(self, rows: int, waited_s: list[float], limit: int, fit: BatchFit) -> None:
        """Judge a batch.

        Args:
            rows: its samples.
            waited_s: for each request in it, the time from arrival to the end of the batch.
            limit: the limit that was in force; below ours where memory or missing workers set it.
            fit: of batch times.
        """
        self._judge_reach(rows, fit)
        if self.state is TuningState.UNREACHABLE or rows < limit:
            return
        late = sum([waited > self._objective_s for waited in waited_s])
        if self._settling:
            self._settling -= 1
            self._owe(late)
            return
        self._batches += 1
        self._seen += len(waited_s)
        self._late += late
        if self._late > max(1.0, LATE * max(self._seen, EVIDENCE_ROWS)):
            self._cut(min(rows, self.limit))
            self._begin()
        elif self._seen >= EVIDENCE_ROWS and self._batches >= EVIDENCE_BATCHES:
            self._kept(rows)
            self._begin()

    def _judge_reach(self, rows: int, fit: BatchFit) -> None:
        """Find out whether batches of one would keep the objective, with another one ahead.

        A fit without a slope, of batches all alike, only bounds their time from above: if that is too long, nothing follows.
        """
        if not fit.good:
            return
        if 2 * fit.predict(1) <= self._objective_s:
            if self.state is TuningState.UNREACHABLE:
                self.state = TuningState.RISING
        elif fit.per_sample_s or rows == 1:
            self.state, self.limit = TuningState.UNREACHABLE, self._most
            self._begin()

    def _cut(self, size: int) -> None:
        if size > 1:
            self.limit = max(1, int(CUT * size))
            self.cuts += 1
        self._broke = size
        self._owe(self._late)
        self.state, self._settling = TuningState.CUT, _SETTLE

    def _kept(self, rows: int) -> None:
        if rows >= self._broke:
            self._broke = 0
        self._owe(self._late - _REPAID * self._seen)
        if self.limit >= self._most:
            self.state = TuningState.HIGHEST
        elif rows < self.limit:  # something else held the batch below what we allow
            return
        elif self._broke and self._owed and self.limit + self._step >= self._broke:
            self.state = TuningState.SETTLED
        else:
            self.limit = min(self._most, self.limit + self._step)
            self.raises += 1
            self.state = TuningState.RISING

    def _owe(self, late: float) -> None:
        """Add to what is owed: at most the batch that showed a try to fail and those that settle after it, all of the size that broke."""
        self._owed = min(max(0.0, self._owed + late), (1 + _SETTLE) * self._broke)

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
