"""How long it pays to wait for one more sample.

Waiting for the next arrival delays each of the n samples that wait, and saves one batch's fixed cost `a` if somebody comes. With w the
longest permitted wait, p the share of arrivals that come within w of the one before, and g the mean of min(gap, w):

    waiting pays  <=>  n g < p a

When arrivals are sure (p = 1) that is the plain rule "expected gap x samples waiting < fixed cost". Cutting gaps at w keeps one quiet night
from spoiling the mean. A lone client's next request comes only after its reply, so its gap exceeds the whole batch time, which is at least
`a`: it never waits.

Gaps are kept apart by how many samples waited when they began. Three clients that are answered together ask again together: after their
first request the next comes at once, after their third nobody comes; one mean over all would wait in vain once for each batch. From
APART on, a number that has not been seen often enough is told by those of the same power of two.

And because a forecast can be wrong, no more is ever spent on waiting than could be saved: the wait ends at a / n from the first arrival.

What came while a batch ran has waited longer than any window when the batch ends; yet that moment is when those whom it answers ask again.
So gaps behind a batch are kept apart too, from its end on, and where they say that waiting pays, the wait counts from there. Without this,
clients in a closed loop that fall into two groups, one waiting while the other is served, would never find together again.

The longest permitted wait is `idle_window_ms` while fewer than min_batch wait. From there on it lies between that and `window_ms`, as the
feedback from recent batches has it: where they keep filling up it pays to let them, where they stay far below the limit it does not. Where
there is no forecast (too few batches, or times that no line fits) the window is fixed: the idle one, times the same feedback, always from
the first arrival, and none from min_batch on.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from gpupool.spec import BatchingSpec

from .fit import BatchFit

#: Weight of the newest gap, from which gap on: a change of traffic is believed within some eight arrivals. Before it is a plain mean.
_NEWEST: Final = 1 / 8
_PLAIN: Final = 8
#: Gaps before their mean is believed.
_EVIDENCE: Final = 8
APART: Final = 8
#: A batch below this share of the limit is far below it.
FAR_BELOW: Final = 0.25
#: What a full batch gives back of the window, as a share of all of it; one far below the limit halves what is left.
_LENGTHEN: Final = 0.25
_SHORTEST: Final = 1 / 16


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
        self.count = count = self.count + 1
        weight = _NEWEST if count > _PLAIN else 1 / count
        if gap_s < longest_s:
            self.mean_s += (gap_s - self.mean_s) * weight
            self.share += (1.0 - self.share) * weight
        else:
            self.mean_s += (longest_s - self.mean_s) * weight
            self.share -= self.share * weight


class ArrivalGaps:
    """The gaps between arrivals of one model and bucket. What waits behind a batch counts from the batch's end."""

    __slots__ = ("_alike", "_behind", "_exact", "_idle_s", "_min_batch", "_most", "_since", "_waiting", "_window_s")

    def __init__(self, policy: BatchingSpec) -> None:
        self._idle_s, self._window_s = policy.idle_window_ms / 1000, policy.window_ms / 1000
        self._min_batch, self._most = policy.min_batch, policy.max_batch
        self._exact: defaultdict[int, Gap] = defaultdict(
            Gap
        )  # by samples waiting, fewer than max_batch; negative: behind a batch that ended
        self._alike: defaultdict[int, Gap] = defaultdict(Gap)  # the same by their bit length
        self._since = 0.0
        self._waiting = 0  # 0: nothing has arrived yet
        self._behind = False

    def add(self, now: float, waiting: int) -> None:
        """Note an arrival, after which `waiting` samples wait."""
        before = self._waiting
        if 0 < before < self._most:  # whether more should wait is never asked
            gap_s, longest_s = now - self._since, self._idle_s if before < self._min_batch else self._window_s
            self._exact[-before if self._behind else before].add(gap_s, longest_s)
            if before >= APART:
                alike = before.bit_length()
                self._alike[-alike if self._behind else alike].add(gap_s, longest_s)
        self._since = now
        self._waiting = waiting
        self._behind = False

    def freed(self, now: float, waiting: int) -> None:
        """Note that the device has become free while so many wait."""
        self._since = now
        self._waiting = waiting
        self._behind = True

    def after(self, waiting: int) -> Gap:
        """Return what is known of gaps that began as the present one did, with so many samples waiting."""
        sign = -1 if self._behind else 1
        exact = self._exact.get(sign * waiting)
        if exact is not None and exact.known:
            return exact
        alike = self._alike.get(sign * waiting.bit_length()) if waiting >= APART else None
        return _UNKNOWN if alike is None else alike


_UNKNOWN: Final = Gap()


class Feedback:
    """What recent batches leave of the window, from 0 to 1."""

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share = 1.0

    def ran(self, rows: int, limit: int) -> None:
        """Take in a batch of so many rows where `limit` were allowed."""
        if rows >= limit:
            self.share = min(1.0, self.share + _LENGTHEN)
        elif rows < FAR_BELOW * limit:
            self.share = self.share / 2 if self.share > _SHORTEST else 0.0


def longest_s(rows: int, policy: BatchingSpec, left: float) -> float:
    """Return the longest that `rows` waiting samples of an adaptive model may wait, where the feedback leaves so much of it."""
    idle_ms, window_ms = policy.idle_window_ms, policy.window_ms
    return (idle_ms if rows < policy.min_batch else idle_ms + (window_ms - idle_ms) * left) / 1000


def worthwhile_wait(rows: int, longest_s: float, fit: BatchFit, gap: Gap) -> float:
    """Return how long a known fit and known arrivals make it worth to wait; at most `longest_s`."""
    if rows * gap.mean_s < gap.share * fit.fixed_s:
        return min(longest_s, fit.fixed_s / rows)
    return 0.0
