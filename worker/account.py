"""What a worker's batches were, counted since its start: how large, why they closed, how full."""

from __future__ import annotations

from typing import Any, Final

from gpupool.batches import SIZES

from .batch import CloseReason

#: Weight of the newest batch in the smoothed fill, from which batch on; before it is a plain mean.
_NEWEST: Final = 1 / 16
_PLAIN: Final = 16


class Account:
    """The batches of one group, or of one model."""

    __slots__ = ("batches", "borrowed", "closed", "fill", "rows", "sizes")

    def __init__(self) -> None:
        self.batches = 0
        self.rows = 0
        self.borrowed = 0  # rows of shorter buckets that filled batches up
        self.fill = 0.0  # smoothed share of the limit
        self.closed: dict[CloseReason, int] = {}
        self.sizes = [0] * (len(SIZES) + 1)  # how many batches of up to SIZES[i], and of more than the last

    def note(self, reason: CloseReason, rows: int, limit: int, borrowed: int) -> None:
        """Count a batch."""
        self.batches += 1
        self.rows += rows
        self.borrowed += borrowed
        self.fill += (rows / limit - self.fill) * (_NEWEST if self.batches > _PLAIN else 1 / self.batches)
        self.closed[reason] = self.closed.get(reason, 0) + 1
        self.sizes[min((rows - 1).bit_length(), len(SIZES))] += 1

    def include(self, other: Account) -> None:
        """Count another's batches too. The smoothed fill stays: it tells of what is there now."""
        self.batches += other.batches
        self.rows += other.rows
        self.borrowed += other.borrowed
        for reason, count in other.closed.items():
            self.closed[reason] = self.closed.get(reason, 0) + count
        self.sizes = [mine + more for mine, more in zip(self.sizes, other.sizes, strict=True)]

    def describe(self) -> dict[str, Any]:
        """Tell people."""
        return {
            "batches": self.batches,
            "rows": self.rows,
            "borrowed_rows": self.borrowed,
            "fill": round(self.fill, 4),
            "closed": {str(reason): count for reason, count in self.closed.items()},
        }


class Prediction:
    """What batches were expected to take beside what they took, over those for which a good fit predicted: the drift is their ratio."""

    __slots__ = ("batches", "measured_s", "predicted_s")

    def __init__(self) -> None:
        self.batches = 0
        self.predicted_s = self.measured_s = 0.0

    def ran(self, predicted_s: float, measured_s: float) -> None:
        """Take in a batch that ran cleanly."""
        self.batches += 1
        self.predicted_s += predicted_s
        self.measured_s += measured_s

    def describe(self) -> dict[str, Any]:
        """Tell people and metrics: sums that only grow, in seconds."""
        return {"batches": self.batches, "predicted_s": round(self.predicted_s, 6), "measured_s": round(self.measured_s, 6)}


class Turnaround:
    """How long the device waited for us: from the end of a batch to the begin of one that was full and complete by then.

    A pause in which nothing waited, or in which the next batch was still filling up, is none that our own work costs.
    """

    __slots__ = ("_ended_at", "busy_s", "idle_s", "pairs")

    def __init__(self) -> None:
        self.pairs = 0
        self.idle_s = self.busy_s = 0.0
        self._ended_at = 0.0  # of the batch before; 0: there was none

    def ran(self, started_at: float, seconds: float, complete_at: float | None) -> None:
        """Take in a batch: when it began, how long it took, and when the last of its samples had come if it was full. Monotonic seconds."""
        if complete_at is not None and complete_at <= self._ended_at:
            self.pairs += 1
            self.idle_s += started_at - self._ended_at
            self.busy_s += seconds
        self._ended_at = started_at + seconds

    def describe(self) -> dict[str, Any]:
        """Tell people: the mean gap, and what share of the batch time it is."""
        return {
            "pairs": self.pairs,
            "gap_ms": round(1000 * self.idle_s / self.pairs, 4) if self.pairs else None,
            "share": round(self.idle_s / self.busy_s, 5) if self.busy_s else None,
        }
