"""What the pool did, as the supervisor remembers it: numbered events of one line each, the newest thousand at hand, and which are wanted.

A number is never used twice, over restarts of the supervisor too, so that whoever follows asks for those after the last one it saw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gpupool.log_sink import Record, render_json

#: Events that are kept at hand, and given out at a time.
KEPT: Final = 1000
#: Bytes of events in one answer; the newest count.
MAX_ANSWER_BYTES: Final = 1 << 20
#: Bytes of one half of the journal's file: the current one, and the one before it.
HALF_BYTES: Final = 1 << 20
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
#: What a model prints, and what each request came to, stand in the log.
_NOT_OURS: Final = frozenset({"output", "request"})


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events are asked for: of a worker (slot number or device id), from a level on, not before an instant, after a number."""

    worker: str | None = None
    level: str = "debug"
    since: float = 0.0  # epoch seconds
    after: int = 0

    def takes(self, event: Mapping[str, Any]) -> bool:
        """Whether an event is one of them."""
        if LEVELS.get(str(event.get("level")), 50) < LEVELS[self.level] or number(event) <= self.after:
            return False
        time = event.get("time")
        if self.since and not (isinstance(time, int | float) and time >= self.since):
            return False
        return self.worker is None or self.worker in _names(event)


class Journal:
    """The newest events. `devices`: ids by slot, so that each event about a worker says which card."""

    def __init__(self, devices: Sequence[str] = (), *, kept: int = KEPT) -> None:
        self._devices = devices
        self._events: deque[dict[str, Any]] = deque(maxlen=kept)
        self.last = 0

    def restore(self, events: Iterable[dict[str, Any]]) -> None:
        """Take over what an earlier supervisor wrote, the oldest first."""
        for event in events:
            self._events.append(event)
            self.last = max(self.last, number(event))

    def add(self, record: Record) -> bytes | None:
        """Keep a log record that is the pool's story; returns its line for the file, None when it is no such record."""
        if record.get("event") in _NOT_OURS or LEVELS.get(str(record.get("level")), 50) < LEVELS["info"]:
            return None
        self.last += 1
        # Through the log's own form: plain JSON types, and of a bounded length.
        line = render_json({"n": self.last, **{k: v for k, v in record.items() if k != "timestamp"}, **self._whose(record)})
        self._events.append(orjson.loads(line))
        return line

    def select(self, wanted: Wanted, limit: int) -> list[dict[str, Any]]:
        """Return the newest of those that are wanted, the oldest of them first, within MAX_ANSWER_BYTES."""
        found = newest(self._events, wanted, limit)
        size = 0
        for taken, event in enumerate(reversed(found)):
            size += len(orjson.dumps(event))
            if size > MAX_ANSWER_BYTES:
                return found[len(found) - taken :]
        return found

    def _whose(self, record: Record) -> Record:
        """Name the card of a worker, and the worker of a card."""
        devices, slot, device = self._devices, record.get("worker"), record.get("device")
        if isinstance(slot, int) and device is None and 0 <= slot < len(devices):
            return {"device": devices[slot]}
        if slot is None and isinstance(device, str) and device in devices:
            return {"worker": devices.index(device)}
        slots = record.get("workers")
        if isinstance(slots, list) and slots and all(isinstance(n, int) and 0 <= n < len(devices) for n in slots):
            return {"devices": [devices[n] for n in slots]}
        return {}


def newest(events: Iterable[dict[str, Any]], wanted: Wanted, limit: int) -> list[dict[str, Any]]:
    """Return the last `limit` of those that are wanted, the oldest of them first."""
    return list(deque((event for event in events if wanted.takes(event)), maxlen=limit))


def parse(data: bytes) -> Iterator[dict[str, Any]]:
    """Read a journal's lines; one that is torn or strange is passed over."""
    for line in data.splitlines():
        try:
            event = orjson.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            yield event


def number(event: Mapping[str, Any]) -> int:
    """Return an event's number; 0 when it has none."""
    n = event.get("n")
    return n if isinstance(n, int) else 0


def _names(event: Mapping[str, Any]) -> set[str]:
    many = [item for name in ("workers", "devices") if isinstance(items := event.get(name), list) for item in items]
    return {str(name) for name in (event.get("worker"), event.get("device"), *many) if name is not None}
