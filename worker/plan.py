"""How many samples fit into memory: a straight line through the measured peaks of a few batch sizes, and what follows from it.

Above what the process holds at rest a batch of n samples takes `scratch + n x per_sample` bytes at its peak. So much fits:

    ceiling = (budget - fixed - scratch) / per_sample

Sizes are doubled until the line is good, or until the next one would come near the budget: measuring must not be what breaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .ceiling import GroupKey

#: A line is good when no point is further from it than this share of its own height; three points leave it one degree of freedom.
GOOD: Final = 0.1
_ENOUGH: Final = 3
#: Nothing is tried whose forecast passes this share of what is left of the budget.
NEAR: Final = 0.8
#: What a pool holds above the measured peak.
POOL_MARGIN: Final = 1.2
#: Peaks are pages and blocks, not bytes: below this nothing is told apart.
NOISE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Peak:
    """One measurement: the peak of a batch above what the process holds at rest, in bytes."""

    rows: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """What a batch takes at its peak; `error` is the largest deviation of a measured point, as a share of it."""

    scratch_bytes: int
    per_sample_bytes: int
    error: float

    def peak(self, rows: int) -> int:
        """Forecast a batch's peak in bytes."""
        return self.scratch_bytes + rows * self.per_sample_bytes

    def ceiling(self, room_bytes: int) -> int | None:
        """Return how many samples fit into so many bytes, at least 1; None when samples cost nothing that can be measured."""
        if self.per_sample_bytes <= 0:
            return None
        return max(1, (room_bytes - self.scratch_bytes) // self.per_sample_bytes)


def fitted(peaks: Sequence[Peak]) -> Line:
    """Lay a line through the peaks by least squares; scratch below zero is taken for none."""
    n = len(peaks)
    mean_rows = sum(p.rows for p in peaks) / n
    mean_bytes = sum(p.peak_bytes for p in peaks) / n
    spread = sum((p.rows - mean_rows) ** 2 for p in peaks)
    slope = sum((p.rows - mean_rows) * (p.peak_bytes - mean_bytes) for p in peaks) / spread if spread else 0.0
    scratch = mean_bytes - slope * mean_rows
    if scratch < 0 or not spread:  # through the origin
        scratch, slope = 0.0, sum(p.rows * p.peak_bytes for p in peaks) / sum(p.rows**2 for p in peaks)
    slope = max(0.0, slope)
    error = max(abs(scratch + slope * p.rows - p.peak_bytes) / max(p.peak_bytes, NOISE_BYTES) for p in peaks)
    return Line(round(scratch), round(slope), round(error, 3))


def next_size(peaks: Sequence[Peak], *, most: int, room_bytes: int) -> int | None:
    """Return the batch size to measure next; None when enough is known, or more would come near the budget.

    Args:
        peaks: what was measured so far, growing.
        most: the configured batch: nothing larger is ever run.
        room_bytes: what is left of the budget above what the process holds at rest.
    """
    if not peaks:
        return 1
    last = peaks[-1]
    line = fitted(peaks)
    known = len(peaks) >= _ENOUGH and line.error <= GOOD and last.peak_bytes > 4 * NOISE_BYTES
    if last.rows >= most or known:
        return None
    # A line through one point cannot tell scratch from samples: then twice as many may take twice as much.
    rows = min(2 * last.rows, most)
    forecast = max(line.peak(rows), last.peak_bytes) if len(peaks) > 1 else 2 * last.peak_bytes
    return rows if forecast <= NEAR * room_bytes else None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What is known of one model's bucket. `failed_at`: the size that did not fit while measuring, 0 for none."""

    peaks: tuple[Peak, ...]
    failed_at: int = 0

    @property
    def line(self) -> Line:
        """The line through its peaks."""
        return fitted(self.peaks)

    def ceiling(self, room_bytes: int) -> int | None:
        """Return how many samples fit; what failed while it was measured does not, whatever the line says."""
        ceiling = self.line.ceiling(room_bytes)
        if not self.failed_at:
            return ceiling
        return max(1, min(self.failed_at - 1, ceiling or self.failed_at))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A worker's plan. `fixed_bytes` is held at rest: weights, libraries, whatever loading left."""

    fixed_bytes: int
    groups: Mapping[GroupKey, GroupPlan] = field(default_factory=dict)

    def ceilings(self, budget_bytes: int) -> dict[GroupKey, int]:
        """Return the ceiling of every group that has one, in samples."""
        room = budget_bytes - self.fixed_bytes
        found = {key: group.ceiling(room) for key, group in self.groups.items()}
        return {key: ceiling for key, ceiling in found.items() if ceiling is not None}

    def pool_bytes(self, limits: Mapping[GroupKey, int], budget_bytes: int) -> int:
        """Return what to reserve at start: the peak of the largest batches that may run, with a margin, within `budget_bytes`.

        Batches run one at a time, so the concurrency of the rule "peak x concurrency x 1.2" is that of the samples in a batch.
        """
        peak = max((group.line.peak(limits[key]) for key, group in self.groups.items() if key in limits), default=0)
        return max(0, min(int(peak * POOL_MARGIN), budget_bytes - self.fixed_bytes))


def bucket_of(length: int, bounds: Sequence[int]) -> int:
    """Return the bucket of a length by its upper bound; 0 is the unbounded one. As intake has it."""
    return next((bound for bound in bounds if length <= bound), 0)


def fill_gaps(model: int, bounds: Sequence[int], groups: Mapping[GroupKey, GroupPlan]) -> dict[GroupKey, GroupPlan]:
    """Give buckets without a measurement that of the next longer one: it takes more, so nothing is promised that does not hold.

    Buckets longer than all that were measured get none.
    """
    filled: dict[GroupKey, GroupPlan] = {}
    known: GroupPlan | None = None
    for bucket in (0, *sorted(bounds, reverse=True)):
        known = groups.get((model, bucket), known)
        if known is not None:
            filled[model, bucket] = known
    return filled


def told(
    plan: MemoryPlan, budget_bytes: int | None, names: Sequence[str], limits: Mapping[GroupKey, int]
) -> list[dict[str, Any]]:
    """Say what the plan knows of each group, for people."""
    ceilings = {} if budget_bytes is None else plan.ceilings(budget_bytes)
    return [
        {
            "model": names[key[0]], "bucket": key[1], "per_sample_bytes": group.line.per_sample_bytes,
            "scratch_bytes": group.line.scratch_bytes, "error": group.line.error, "measured": [p.rows for p in group.peaks],
            "ceiling": ceilings.get(key), "limit": limits.get(key),
        }
        for key, group in sorted(plan.groups.items())
    ]  # fmt: skip
