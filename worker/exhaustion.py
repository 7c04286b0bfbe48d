"""When memory has got lost, so that only a new process helps: batches fail again and again, and more is held at rest than after loading.

Failures alone prove nothing: they come from samples that are too large, which a new process would find as large, and whoever sends them
must not be able to have workers replaced. What is held although nothing runs - a leak, a heap or cache in splinters - a new one has not.
"""

from __future__ import annotations

from collections import deque
from typing import Final

#: So many failures within so long a time, each with more held at rest than this share of the budget above what it was after loading.
FAILURES: Final = 3
WINDOW_S: Final = 300.0
GROWN: Final = 0.1
#: The supervisor may have reasons to let a worker go on for now: it is asked again.
ASK_AGAIN_S: Final = 10.0


class Exhaustion:
    """Counts failures for want of memory. Instants in monotonic seconds, sizes in bytes."""

    def __init__(self) -> None:
        self.failures = 0  # runs of forward that failed so
        self.recycle_reason: str | None = None  # for the supervisor; whoever tells it takes it away
        self._fixed = 0
        self._budget = 0
        self._with_growth: deque[float] = deque(maxlen=FAILURES)
        self._asked_at: float | None = None

    def begin(self, *, fixed_bytes: int, budget_bytes: int) -> None:
        """Take note of what is held at rest after loading, and of what there is in all."""
        self._fixed, self._budget = fixed_bytes, budget_bytes

    def failed(self, runs: int, at_rest_bytes: int, now: float) -> None:
        """Note a batch of which `runs` runs failed; `at_rest_bytes` is held now that it is cleaned up."""
        self.failures += runs
        grown = at_rest_bytes - self._fixed
        if not self._budget or grown <= GROWN * self._budget:
            return
        self._with_growth.append(now)
        often = len(self._with_growth) == FAILURES and now - self._with_growth[0] <= WINDOW_S
        if often and (self._asked_at is None or now - self._asked_at >= ASK_AGAIN_S):
            self._asked_at = now
            self.recycle_reason = f"out of memory {FAILURES} times in {now - self._with_growth[0]:.0f} s, {grown >> 20} MiB more held than after loading"
