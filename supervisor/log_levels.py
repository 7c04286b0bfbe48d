"""The log level of each component: the configured one, unless an operator has asked for another, for a while or until further notice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Levels by name, as in logging.
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
COMPONENTS: Final = ("supervisor", "router", "worker")


@dataclass(frozen=True, slots=True)
class Wish:
    """A level asked for; `until` is monotonic, infinite for one that stays."""

    level: str
    until: float


class LogLevels:
    """Levels by target: "supervisor", "router", "worker" (all of them) or a slot number, which goes before "worker"."""

    def __init__(self, configured: str) -> None:
        self.configured = configured
        self._wishes: dict[str | int, Wish] = {}

    def ask(self, target: str | int, level: str, now: float, for_s: float) -> None:
        """Take a wish; `for_s` 0: it stays. A level "default" takes an earlier wish back."""
        if level == "default":
            self._wishes.pop(target, None)
        else:
            self._wishes[target] = Wish(level, now + for_s if for_s else math.inf)

    def expire(self, now: float) -> list[str | int]:
        """Drop the wishes whose time is over and return their targets."""
        over = [target for target, wish in self._wishes.items() if wish.until <= now]
        for target in over:
            del self._wishes[target]
        return over

    def of(self, target: str | int) -> str:
        """Return the level in force for a target."""
        wish = self._wishes.get(target) or (self._wishes.get("worker") if isinstance(target, int) else None)
        return wish.level if wish else self.configured

    def document(self, now: float) -> Mapping[str, Any]:
        """Tell the levels by component, and what was asked for with the seconds it still holds (None: it stays)."""
        asked = [
            {"component": target if isinstance(target, str) else f"worker {target}", "level": wish.level,
             "for_s": None if math.isinf(wish.until) else round(max(0.0, wish.until - now), 1)}
            for target, wish in self._wishes.items()
        ]  # fmt: skip
        return {"configured": self.configured, "levels": {name: self.of(name) for name in COMPONENTS}, "asked": asked}
