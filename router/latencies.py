"""How long answered requests took, stage by stage: the histograms of each model, in whole microseconds.

Noted once for each reply, so it does little: a bisection over sixteen bounds for each stage, and two additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

from gpupool.stages import BOUNDS_US, ROUTER_STAGES, STAGES

_LAST: Final = len(BOUNDS_US)


class Latencies:
    """By model's number and stage: how many took up to each bound, how many longer, and the sum."""

    def __init__(self, models: int) -> None:
        self._counts = [[[0] * (_LAST + 1) for _ in STAGES] for _ in range(models)]
        self._sums = [[0] * len(STAGES) for _ in range(models)]

    def note(self, model: int, pending_us: int, total_us: int, beside: Sequence[int] | None) -> None:
        """Count an answer: its wait in the router and its whole time; `beside`: the worker's four stages, None if none had it."""
        counts, sums = self._counts[model], self._sums[model]
        counts[0][bisect_left(BOUNDS_US, pending_us)] += 1
        sums[0] += pending_us
        counts[1][bisect_left(BOUNDS_US, total_us)] += 1
        sums[1] += total_us
        if beside is not None:
            for stage, us in enumerate(beside, ROUTER_STAGES):
                counts[stage][bisect_left(BOUNDS_US, us)] += 1
                sums[stage] += us

    def told(self, names: Sequence[str]) -> dict[str, Any]:
        """Return plain values by model's name and stage; models that answered nothing are left out."""
        return {
            name: {stage: {"counts": of_stage, "us": us} for stage, of_stage, us in zip(STAGES, counts, sums, strict=True)}
            for name, counts, sums in zip(names, self._counts, self._sums, strict=True)
            if any(counts[1])
        }
