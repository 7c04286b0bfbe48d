"""The memory of all workers over time: whose rises steadily while they work, and the events that tell it.

Two kinds are watched. `host`: resident memory of the process, from the board. `device`: what its tensors hold on the card, from its reports; not
what the allocator keeps in reserve, which rises in steps and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpupool.board import SlotRecord

from . import events as ev
from .leak import LeakPolicy, Slope, Trend

#: A look at least so often, and so many in each cell of the window.
_MOST_S: Final = 5.0
_LOOKS_PER_CELL: Final = 8


class LeakWatch:
    """The trends of the workers' present processes, by slot and kind."""

    def __init__(self, policy: LeakPolicy) -> None:
        self._policy = policy
        self._due = 0.0
        self._processes: dict[int, int] = {}
        self._trends: dict[int, dict[str, Trend]] = {}

    def set_policy(self, policy: LeakPolicy) -> list[ev.Event]:
        """Judge by other rules from now on; what was seen for the old ones is forgotten, suspicions too."""
        if policy == self._policy:
            return []
        events = [
            _event(slot, self._processes[slot], kind, trend, suspected=False)
            for slot, trends in self._trends.items()
            for kind, trend in trends.items()
            if trend.suspected
        ]
        self._policy = policy
        self._processes.clear()
        self._trends.clear()
        return events

    def is_due(self, now: float) -> bool:
        """Whether it is time to look at the workers again. True is said once for each look."""
        if not self._policy.bytes_per_hour or now < self._due:
            return False
        self._due = now + min(_MOST_S, self._policy.cell_s / _LOOKS_PER_CELL)
        return True

    def observe(self, slot: int, incarnation: int, held: Mapping[str, int], samples: int, now: float) -> list[ev.Event]:
        """Take in what a worker holds by kind, in bytes, and how many samples it has run; tell what is new."""
        if self._processes.get(slot) != incarnation:
            self._processes[slot] = incarnation
            self._trends[slot] = {}
        events: list[ev.Event] = []
        for kind, held_bytes in held.items():
            trend = self._trends[slot].setdefault(kind, Trend(self._policy))
            if trend.observe(held_bytes, samples, now):
                events.append(_event(slot, incarnation, kind, trend, suspected=trend.suspected))
        return events

    def view(self, slot: int, incarnation: int) -> dict[str, Any]:
        """What the status document shows of a worker, by kind; empty until a whole window has been seen."""
        if self._processes.get(slot) != incarnation:
            return {}
        return {
            kind: {
                "slope_bytes_per_hour": round(slope.bytes_per_hour), "growth_bytes": slope.growth_bytes,
                "worked_s": round(slope.worked_s, 1), "suspected": trend.suspected,
            }
            for kind, trend in self._trends[slot].items()
            if (slope := trend.slope)
        }  # fmt: skip


def memory_held(record: SlotRecord, report: Mapping[str, Any]) -> dict[str, int]:
    """What a worker holds by kind, in bytes, from its record and its last report; what cannot be told is left out."""
    held = {"host": record.memory_bytes, "device": report.get("memory", {}).get("allocated_bytes")}
    return {kind: held_bytes for kind, held_bytes in held.items() if isinstance(held_bytes, int) and held_bytes > 0}


def _event(slot: int, incarnation: int, kind: str, trend: Trend, *, suspected: bool) -> ev.Event:
    slope = trend.slope or Slope(0.0, 0, 0.0, steady=False)
    return ev.LeakJudged(
        slot, incarnation, kind, suspected=suspected, bytes_per_hour=round(slope.bytes_per_hour), growth_bytes=slope.growth_bytes,
        worked_s=round(slope.worked_s, 3),
    )  # fmt: skip
