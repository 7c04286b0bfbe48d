"""Starts spread over time: a few at once, then one after another, so that loading models does not stall disk, bus and each other.

The generic cell rate algorithm (ITU-T I.371): a theoretical arrival time that every start pushes on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StartPacer:
    """At most `burst` starts at once, and one every `every_s` in the long run."""

    burst: int = 2
    every_s: float = 0.2
    _next: float = 0.0

    def earliest(self) -> float:
        """The instant from which the next start is allowed."""
        return self._next - (self.burst - 1) * self.every_s

    def take(self, now: float) -> None:
        """Count a start."""
        self._next = max(self._next, now) + self.every_s
