"""How long a batch of n takes: t = a + b n, fitted by least squares that forget exponentially.

`a` is what every batch costs whatever its size (launches, Python, transfers): what is saved when two batches become one. Old batches
lose weight by FORGET each, so the fit follows a card that gets hot or a model that warms up within some thirty batches.
Source: weighted normal equations of a line; five running sums, no history.

A line that misses is not to be acted on. Each batch is predicted before it is learned; the smoothed distance is the residual, and a fit
whose residual is above POOR of a batch's time is poor. One wild batch must neither bend the line nor damn it: its time counts as at
most WILD times what was expected, its distance as at most one batch's time.
"""

from __future__ import annotations

from typing import Final

FORGET: Final = 31 / 32
#: Batches before the fit is believed.
EVIDENCE: Final = 8
#: Residual, as a share of the mean time of a batch, from which on the fit is not believed.
POOR: Final = 0.3
#: Distances below this are the clock's and the scheduler's, not the model's.
_NOISE_S: Final = 0.0002
#: A batch counts as at most so many times as long as expected; one that really became that slow is followed in a few more.
WILD: Final = 4.0
#: Below this relative variance of n the two coefficients cannot be told apart.
_MIN_SPREAD: Final = 1e-3


class BatchFit:
    """The fit of one model and bucket. All times in seconds.

    Attributes:
        known: whether enough batches were seen to tell what one takes.
        good: whether the line is known and fits well enough to act on.
        mean_s: the mean time of a batch of late.
    """

    __slots__ = ("_n", "_nn", "_nt", "_t", "_w", "batches", "fixed_s", "good", "known", "mean_s", "per_sample_s", "residual_s")

    def __init__(self) -> None:
        self._w = self._n = self._nn = self._t = self._nt = 0.0
        self.batches = 0
        self.fixed_s = 0.0
        self.per_sample_s = 0.0
        self.residual_s = 0.0
        self.mean_s = 0.0
        self.known = self.good = False

    def add(self, samples: int, seconds: float) -> None:
        """Take in one batch that ran cleanly."""
        self.batches += 1
        if self.batches == 2:  # the first one paid for what is made at first use
            self._w = self._n = self._nn = self._t = self._nt = 0.0
        if self.batches >= EVIDENCE:
            expected = self.fixed_s + self.per_sample_s * samples
            seconds = min(seconds, WILD * max(expected, self.mean_s, _NOISE_S))
            miss = min(abs(seconds - expected), self.mean_s)
            self.residual_s += (miss - self.residual_s) * (1 - FORGET)
        self._w = self._w * FORGET + 1.0
        self._n = self._n * FORGET + samples
        self._nn = self._nn * FORGET + samples * samples
        self._t = self._t * FORGET + seconds
        self._nt = self._nt * FORGET + samples * seconds
        self._solve()
        self.mean_s = self._t / self._w
        self.known = self.batches >= EVIDENCE
        self.good = self.known and self.residual_s <= max(_NOISE_S, POOR * self.mean_s)

    def predict(self, samples: int) -> float:
        """Expected time of a batch; 0 until known."""
        return self.fixed_s + self.per_sample_s * samples if self.known else 0.0

    def _solve(self) -> None:
        w, n, t = self._w, self._n, self._t
        spread = w * self._nn - n * n
        if spread > _MIN_SPREAD * n * n:
            slope = (w * self._nt - n * t) / spread
            fixed = (t - slope * n) / w
            if slope >= 0.0 and fixed >= 0.0:
                self.fixed_s, self.per_sample_s = fixed, slope
                return
            if fixed < 0.0:  # steeper than proportional: nothing is saved by joining batches
                self.fixed_s, self.per_sample_s = 0.0, self._nt / self._nn
                return
        # All batches alike (or noise): call all of it fixed. That is the upper bound of `a`, so batches of other sizes get tried.
        self.fixed_s, self.per_sample_s = t / w, 0.0
