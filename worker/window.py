"""How long it pays to wait for one more sample.

Waiting for the next arrival delays each of the n samples that wait, and saves one batch's fixed cost `a` if somebody comes. With w the
longest permitted wait, p the share of arrivals that come within w of the one before, and g the mean of min(gap, w):

    waiting pays  <=>  n g < p a

When arrivals are sure (p = 1) that is the plain rule "expected gap x samples waiting < fixed cost". Cutting gaps at w keeps one quiet night
from spoiling the mean, and bursts (several clients answered together ask again together) show up in p. A lone client's next request comes only
after its reply, so its gap exceeds the whole batch time, which is at least `a`: it never waits. And because a forecast can be wrong, no more
is ever spent on waiting than could be saved: the wait ends at a / n from the first arrival at the latest.
"""

from __future__ import annotations

from typing import Final

from .fit import BatchFit

#: Weight of the newest gap: a change of traffic is believed within some eight arrivals.
_NEWEST: Final = 1 / 8
#: Gaps before the mean is believed.
_EVIDENCE: Final = 8


class ArrivalGaps:
    """Smoothed gaps between arrivals of one model and bucket, cut at `longest_s`."""

    __slots__ = ("_last", "_longest_s", "gap_s", "gaps", "share")

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._last: float | None = None
        self.gaps = 0
        self.gap_s = longest_s
        self.share = 0.0

    def add(self, now: float) -> None:
        """Note one request's arrival."""
        if self._last is not None:
            self.gaps += 1
            gap = now - self._last
            weight = max(_NEWEST, 1 / self.gaps)  # a plain mean at first
            if gap < self._longest_s:
                self.share += (1.0 - self.share) * weight
                self.gap_s += (gap - self.gap_s) * weight
            else:
                self.share -= self.share * weight
                self.gap_s += (self._longest_s - self.gap_s) * weight
        self._last = now

    @property
    def known(self) -> bool:
        """Whether enough gaps were seen."""
        return self.gaps >= _EVIDENCE


def worthwhile_wait(rows: int, longest_s: float, fit: BatchFit, gaps: ArrivalGaps) -> float:
    """Return how long, from the first arrival, `rows` waiting samples should wait for company; at most `longest_s`."""
    if not (fit.known and gaps.known):
        return longest_s
    if rows * gaps.gap_s < gaps.share * fit.fixed_s:
        return min(longest_s, fit.fixed_s / rows)
    return 0.0
