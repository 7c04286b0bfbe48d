"""Counts that workers and routers tell of themselves, kept over their restarts: a counter on the metrics page must never go back.

What each incarnation last told is added to the sum of those before it when another one speaks. Counts are nested maps, lists and numbers;
what a process had not told when it died, a second's worth at most, is lost. A number that is smaller than before within one incarnation, or
of another shape, comes from a process gone wrong: the larger one stays, the odd one is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Counts = Mapping[str, Any]


class Tallies:
    """By slot: what ended incarnations told, and what the present one does."""

    def __init__(self) -> None:
        self._ended: dict[int, Any] = {}
        self._live: dict[int, tuple[int, Any]] = {}

    def tell(self, slot: int, incarnation: int, counts: Counts) -> None:
        """Take in what a process has counted since its start."""
        before = self._live.get(slot)
        if before is not None and before[0] > incarnation:
            return  # the last words of one that was replaced
        if before is not None and before == (incarnation, counts):
            return  # an idle process tells the same again and again
        if before is not None and before[0] < incarnation:
            self._ended[slot] = _join(self._ended.get(slot, {}), before[1], _plus)
            before = None
        self._live[slot] = (incarnation, _join(before[1] if before else {}, counts, max))

    def total(self, slot: int) -> dict[str, Any]:
        """What all processes of a slot have counted."""
        live = self._live.get(slot)
        total: dict[str, Any] = _join(self._ended.get(slot, {}), live[1] if live else {}, _plus)
        return total


def _plus(a: float, b: float) -> float:
    return a + b


def _join(a: Any, b: Any, numbers: Any) -> Any:
    """Join two trees of counts number by number; what only one of them has is taken as it is."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return {key: _join(a[key], b[key], numbers) if key in a and key in b else a.get(key, b.get(key)) for key in {**a, **b}}
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return a
        # Numbers first: nearly all of it are the buckets of histograms.
        return [numbers(x, y) if type(x) is type(y) is int else _join(x, y, numbers) for x, y in zip(a, b, strict=True)]
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return numbers(a, b)
    return a
