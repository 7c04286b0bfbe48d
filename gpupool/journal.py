"""What the pool did, as events: one JSON line each, numbered, and which of them are wanted. The supervisor writes them, commands show them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Events that are kept at hand, and given out at a time.
KEPT: Final = 1000
#: Bytes of one half of the journal's file: the current one, and the one before it.
HALF_BYTES: Final = 1 << 20
#: Numbers and instants that a journal can hold: its file may be damaged, and what is read from it must never end who reads. 2^53, year 9999.
_MAX_NUMBER: Final = 1 << 53
_MAX_TIME: Final = 253402300799.0
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events are asked for: of a worker (slot number or device id), from a level on, not before an instant, after a number."""

    worker: str | None = None
    level: str = "debug"
    since: float = 0.0  # epoch seconds
    after: int = 0

    def takes(self, event: Mapping[str, Any]) -> bool:
        """Whether an event is one of them."""
        if LEVELS.get(str(event.get("level")), 50) < LEVELS[self.level]:
            return False
        if self.after and number(event) <= self.after:
            return False
        time = event.get("time")
        if self.since and not (isinstance(time, int | float) and time >= self.since):
            return False
        return self.worker is None or self.worker in _names(event)


def newest(events: Iterable[dict[str, Any]], wanted: Wanted, limit: int) -> list[dict[str, Any]]:
    """Return the last `limit` of those that are wanted, the oldest of them first."""
    return list(deque((event for event in events if wanted.takes(event)), maxlen=limit))


def parse(data: bytes) -> Iterator[dict[str, Any]]:
    """Read a journal's lines; one that is torn or strange is passed over."""
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str) and _sound(event):
            yield event


def _sound(event: Mapping[str, Any]) -> bool:
    n, time = event.get("n", 0), event.get("time", 0.0)
    if not isinstance(n, int) or not isinstance(time, int | float):
        return False
    return 0 <= n <= _MAX_NUMBER and 0 <= time <= _MAX_TIME  # NaN is not


def number(event: Mapping[str, Any]) -> int:
    """Return an event's number; 0 when it has none."""
    n = event.get("n")
    return n if isinstance(n, int) else 0


def _names(event: Mapping[str, Any]) -> set[str]:
    many = [item for name in ("workers", "devices") if isinstance(items := event.get(name), list) for item in items]
    return {str(name) for name in (event.get("worker"), event.get("device"), *many) if name is not None}
