"""How long it pays to wait for one more sample.

Waiting for the next arrival delays each of the n samples that wait, and saves one batch's fixed cost `a` if somebody comes. With w the
longest permitted wait, p the share of arrivals that come within w of the one before, and g the mean of min(gap, w):

    waiting pays  <=>  n g < p a

When arrivals are sure (p = 1) that is the plain rule "expected gap x samples waiting < fixed cost". Cutting gaps at w keeps one quiet night
from spoiling the mean. A lone client's next request comes only after its reply, so its gap exceeds the whole batch time, which is at least
`a`: it never waits.

Gaps are kept apart by how many samples waited when they began. Three clients that are answered together ask again together: after their
first request the next comes at once, after their third nobody comes; one mean over all would wait in vain once for each batch.

And because a forecast can be wrong, no more is ever spent on waiting than could be saved: the wait ends at a / n from the first arrival.
"""

from __future__ import annotations

from typing import Final

from .fit import BatchFit

#: Weight of the newest gap: a change of traffic is believed within some eight arrivals.
_NEWEST: Final = 1 / 8
#: Gaps before their mean is believed.
_EVIDENCE: Final = 8


class Gap:
    """What is known of the gaps after one number of waiting samples."""

    __slots__ = ("count", "mean_s", "share")

    def __init__(self) -> None:
        self.count = 0
        self.mean_s = 0.0  # of min(gap, longest wait)
        self.share = 0.0  # of gaps shorter than the longest wait

    @property
    def known(self) -> bool:
        """Whether enough gaps were seen."""
        return self.count >= _EVIDENCE

    def add(self, gap_s: float, longest_s: float) -> None:
        """Take in one gap."""
        self.count += 1
        weight = max(_NEWEST, 1 / self.count)  # a plain mean at first
        self.mean_s += (min(gap_s, longest_s) - self.mean_s) * weight
        self.share += ((gap_s < longest_s) - self.share) * weight


class ArrivalGaps:
    """The gaps between arrivals of one model and bucket.

    Args:
        longest_s: the longest wait; longer gaps count as this long.
        most: from so many waiting samples on nobody asks whether to wait.
    """

    __slots__ = ("_after", "_last", "_longest_s", "_waiting")

    def __init__(self, longest_s: float, most: int) -> None:
        self._longest_s = longest_s
        self._after = [Gap() for _ in range(most + 1)]
        self._last = 0.0
        self._waiting = 0  # 0: nothing has arrived yet

    def add(self, now: float, waiting: int) -> None:
        """Note an arrival, after which `waiting` samples wait."""
        if self._waiting:
            self.after(self._waiting).add(now - self._last, self._longest_s)
        self._last = now
        self._waiting = waiting

    def after(self, waiting: int) -> Gap:
        """Return what is known of gaps that began with so many samples waiting."""
        return self._after[min(waiting, len(self._after) - 1)]


def worthwhile_wait(rows: int, longest_s: float, fit: BatchFit, gap: Gap) -> float:
    """Return how long, from the first arrival, `rows` waiting samples should wait for company; at most `longest_s`."""
    if not (fit.known and gap.known):
        return longest_s
    if rows * gap.mean_s < gap.share * fit.fixed_s:
        return min(longest_s, fit.fixed_s / rows)
    return 0.0
