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

The longest permitted wait is `idle_window_ms` while fewer than min_batch wait, and above that `window_ms` times what the feedback from
recent batches leaves of it: where they keep filling up it pays to let them, where they stay far below the limit it does not. Where there is
no forecast (too few batches, or times that no line fits) the window is fixed: the idle one, times the same feedback, and none from
min_batch on.
"""

from __future__ import annotations

from typing import Final

from gpupool.spec import BatchingSpec

from .fit import BatchFit

#: Weight of the newest gap: a change of traffic is believed within some eight arrivals.
_NEWEST: Final = 1 / 8
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
        self.count += 1
        weight = max(_NEWEST, 1 / self.count)  # a plain mean at first
        self.mean_s += (min(gap_s, longest_s) - self.mean_s) * weight
        self.share += ((gap_s < longest_s) - self.share) * weight


class ArrivalGaps:
    """The gaps between arrivals of one model and bucket."""

    __slots__ = ("_alike", "_exact", "_idle_s", "_last", "_min_batch", "_most", "_waiting", "_window_s")

    def __init__(self, policy: BatchingSpec) -> None:
        self._idle_s, self._window_s = policy.idle_window_ms / 1000, policy.window_ms / 1000
        self._min_batch, self._most = policy.min_batch, policy.max_batch
        self._exact: dict[int, Gap] = {}  # by samples waiting, fewer than max_batch
        self._alike: dict[int, Gap] = {}  # by their bit length
        self._last = 0.0
        self._waiting = 0  # 0: nothing has arrived yet

    def add(self, now: float, waiting: int) -> None:
        """Note an arrival, after which `waiting` samples wait."""
        before = self._waiting
        if 0 < before < self._most:  # whether more should wait is never asked
            gap_s, longest_s = now - self._last, self.longest_s(before)
            _of(self._exact, before).add(gap_s, longest_s)
            if before >= APART:
                _of(self._alike, before.bit_length()).add(gap_s, longest_s)
        self._last = now
        self._waiting = waiting

    def longest_s(self, waiting: int) -> float:
        """Return the longest wait of so many samples, all shares and feedback aside."""
        return self._idle_s if waiting < self._min_batch else self._window_s

    def after(self, waiting: int) -> Gap:
        """Return what is known of gaps that began with so many samples waiting."""
        exact = self._exact.get(waiting)
        if exact is not None and exact.known:
            return exact
        alike = self._alike.get(waiting.bit_length()) if waiting >= APART else None
        return _UNKNOWN if alike is None else alike


_UNKNOWN: Final = Gap()


def _of(gaps: dict[int, Gap], key: int) -> Gap:
    gap = gaps.get(key)
    if gap is None:
        gap = gaps[key] = Gap()
    return gap


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


def wait_s(rows: int, policy: BatchingSpec, fit: BatchFit, gap: Gap, left: float, share: float) -> float:
    """Return how long, from the first arrival, `rows` waiting samples of an adaptive model should wait for company.

    Args:
        rows: samples that wait, fewer than the limit.
        policy: the model's settings.
        fit: of its batch times.
        gap: what is known of arrivals after so many.
        left: what the feedback leaves of the window.
        share: of the configured windows that is in force.
    """
    enough = rows >= policy.min_batch
    longest = (policy.window_ms * left if enough else policy.idle_window_ms) / 1000 * share
    if not (fit.good and gap.known):
        return 0.0 if enough else longest * left
    return worthwhile_wait(rows, longest, fit, gap)


def worthwhile_wait(rows: int, longest_s: float, fit: BatchFit, gap: Gap) -> float:
    """Return how long a known fit and known arrivals make it worth to wait; at most `longest_s`."""
    if rows * gap.mean_s < gap.share * fit.fixed_s:
        return min(longest_s, fit.fixed_s / rows)
    return 0.0
