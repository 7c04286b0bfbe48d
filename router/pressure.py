"""Is there too much work for too long? One bit with two thresholds and two durations, so that it does not flicker."""

from __future__ import annotations

from typing import Final

#: From so full on (1 is a bound reached), for so long, there is pressure.
HIGH: Final = 0.9
HOLD_S: Final = 1.0
#: Fullness comes and goes with each batch that is sent: a dip this short interrupts nothing.
DIP_S: Final = 0.5
#: Less than this for so long, and it is over.
LOW: Final = 0.7
RELEASE_S: Final = 2.0

_NEVER: Final = float("-inf")


class Pressure:
    """The bit. It is looked at often and between looks nothing is known: a gap longer than a dip begins anew."""

    def __init__(self) -> None:
        self._on = False
        self._since = _NEVER  # when the present stretch of fullness began
        self._high_at = _NEVER  # when it was last as full as HIGH
        self._low_at = _NEVER  # and as LOW

    def update(self, fullness: float, now: float) -> bool:
        """Take in how full it is and return whether there is pressure."""
        if fullness >= HIGH:
            if now > self._high_at + DIP_S:
                self._since = now
            self._high_at = now
            self._on = self._on or now >= self._since + HOLD_S
        if fullness >= LOW:
            self._low_at = now
        return self.at(now)

    def at(self, now: float) -> bool:
        """Whether there is pressure, from what is known."""
        if now > self._low_at + RELEASE_S:
            self._on = False
        return self._on
