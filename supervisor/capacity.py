"""Batch limits by healthy workers: how much of the configured batch and window is in force when workers are missing.

Fewer workers mean more work for each; smaller batches and windows then keep latency in hand before throughput. Shrinking is at once, in
the tick in which a worker drops out; growing back waits for a dwell time, so that a flapping worker does not swing the whole pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DegradeRule:
    """Applies while the healthy share of the configured workers is below `healthy_below`."""

    healthy_below: float
    batch_factor: float
    window_factor: float


@dataclass(frozen=True, slots=True)
class Factors:
    """Shares of the configured batch and window that are in force. `level`: by which rule, counted from 1; 0: by none."""

    batch: float = 1.0
    window: float = 1.0
    level: int = field(default=0, compare=False)


def factors_for(rules: Sequence[DegradeRule], healthy: int, configured: int) -> Factors:
    """Return the factors of the last rule whose bound holds, or none at all."""
    share = healthy / configured
    factors = Factors()
    for level, rule in enumerate(rules, 1):
        if share < rule.healthy_below:
            factors = Factors(rule.batch_factor, rule.window_factor, level)
    return factors


@dataclass(slots=True)
class Capacity:
    """The factors in force, with the memory that the dwell time needs."""

    rules: Sequence[DegradeRule]
    dwell_s: float = 5.0
    now_in_force: Factors = Factors()
    _better_since: float | None = None

    def update(self, healthy: int, configured: int, now: float) -> Factors:
        """Take note of the healthy workers and return the factors to use from now on."""
        wanted = factors_for(self.rules, healthy, configured)
        current = self.now_in_force
        if wanted.batch <= current.batch and wanted.window <= current.window:
            self.now_in_force, self._better_since = wanted, None
        elif self._better_since is None:
            self._better_since = now
        elif now >= self._better_since + self.dwell_s:
            self.now_in_force, self._better_since = wanted, None
        return self.now_in_force
