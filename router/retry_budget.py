"""How many executions may be repeated: a share of what has succeeded, so that a storm of deaths cannot double the load.

A token bucket as in Finagle's and Envoy's retry budgets: a fifth of a token for each success and a few per second for a quiet pool. It
holds at most what all workers can be running at once: one death of everything may be made good at a stroke, not one after another.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.2
PER_SECOND: Final = 10.0
MIN_BURST: Final = 100


class RetryBudget:
    """The bucket; it starts full."""

    def __init__(self, burst: int) -> None:
        self._burst = float(max(burst, MIN_BURST))
        self._tokens = self._burst
        self._successes = 0
        self._at: float | None = None

    def take(self, successes: int, now: float) -> bool:
        """Whether one execution more may be repeated; `successes` are all that there have been so far."""
        self._tokens = self._there(successes, now)
        self._successes, self._at = successes, now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def left(self, successes: int, now: float) -> float:
        """Return the share of the budget that is left, 0 to 1; takes nothing."""
        return self._there(successes, now) / self._burst

    def _there(self, successes: int, now: float) -> float:
        since_s = 0.0 if self._at is None else now - self._at
        return min(self._burst, self._tokens + SHARE * (successes - self._successes) + PER_SECOND * since_s)
