"""How much work a hot card gets: halved when it throttles for long, given back in steps when it has cooled down.

Only the clock reasons that protect the hardware count: thermal slowdown in software (0x20) and hardware (0x40) and the power brake
(0x80). The software power cap (0x4) is a loaded card's normal state. A throttling card is never restarted: that would only make the
others hot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HOT_BITS: Final = 0x20 | 0x40 | 0x80
_NAMES: Final = {0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}

#: Throttling this long halves the factor …
FIRST_STEP_S: Final = 30.0
#: … and this much longer halves it again.
NEXT_STEP_S: Final = 60.0
#: Clean this long gives back one step …
CLEAN_S: Final = 120.0
#: … and then one more every so often.
RAISE_EVERY_S: Final = 60.0
RAISE_STEP: Final = 0.25
LOWEST: Final = 0.25
#: The bits flicker about the limit temperature: clean readings between hot ones count as hot for this long.
_HOLD_S: Final = 5.0
#: After a gap in the readings nothing is known about the time between: windows start anew.
_GAP_S: Final = 10.0


@dataclass(slots=True)
class Throttle:
    """One card's factor on batch limit and weight, between LOWEST and 1."""

    factor: float = 1.0
    reason: str = ""
    _seen_at: float | None = None
    _hot_since: float | None = None
    _hot_at: float = 0.0
    _clean_since: float | None = None
    _changed_at: float = 0.0

    def update(self, bits: int, now: float) -> bool:
        """Take one reading of the clock reasons; True if the factor changed."""
        if self._seen_at is None or now > self._seen_at + _GAP_S:
            self._hot_since = self._clean_since = None
        self._seen_at = now
        before = self.factor
        if bits & HOT_BITS:
            self._hot_at, self._clean_since = now, None
            self._hot_since = now if self._hot_since is None else self._hot_since
            self.reason = ", ".join(name for bit, name in _NAMES.items() if bits & bit)
        elif self._hot_since is not None and now >= self._hot_at + _HOLD_S:
            self._hot_since, self._clean_since = None, self._hot_at
        elif self._hot_since is None and self._clean_since is None:
            self._clean_since = now
        if self._hot_since is not None:
            self._lower(self._hot_since, now)
        elif self._clean_since is not None:
            self._raise(self._clean_since, now)
        return self.factor != before

    def _lower(self, hot_since: float, now: float) -> None:
        due = max(hot_since + FIRST_STEP_S, self._changed_at + NEXT_STEP_S if self._changed_at > hot_since else 0.0)
        if now >= due and self.factor > LOWEST:
            self.factor, self._changed_at = max(LOWEST, self.factor / 2), now

    def _raise(self, clean_since: float, now: float) -> None:
        due = max(clean_since + CLEAN_S, self._changed_at + RAISE_EVERY_S)
        if self.factor < 1.0 and now >= due:
            self.factor, self._changed_at = min(1.0, self.factor + RAISE_STEP), now
