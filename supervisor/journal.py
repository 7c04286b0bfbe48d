"""The journal in memory: of the log's records those that tell the pool's story, numbered, each with its card; the newest thousand.

A number is never used twice, over restarts of the supervisor too, so that whoever follows asks for those after the last one it saw. The
file alone cannot see to that: it may lag behind what was given out, or be lost. Therefore a supervisor's numbers begin at the clock's
milliseconds, which the numbers of the one before have not reached: it would have to log a thousand events a second all its life.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from gpupool.journal import KEPT, LEVELS, Wanted, newest, number
from gpupool.log_queue import Record
from gpupool.log_sink import render_json

#: Bytes of events in one answer; the newest count.
MAX_ANSWER_BYTES: Final = 1 << 20
#: What a model prints, and what each request came to, stand in the log.
_NOT_OURS: Final = frozenset({"output", "request"})
#: With one of these a supervisor's story ends, when it ends as it should or can say why not.
_ENDS: Final = frozenset({"pool_stopped", "supervisor_failed"})
_BEGIN: Final = "pool_starting"


class Journal:
    """The newest events. `devices`: ids by slot, so that each event about a worker says which card; `now`: epoch seconds."""

    def __init__(self, devices: Sequence[str] = (), *, now: float = 0.0, kept: int = KEPT) -> None:
        self._devices = devices
        self._events: deque[dict[str, Any]] = deque(maxlen=kept)
        self.last = int(now * 1e3)

    def restore(self, events: Iterable[dict[str, Any]]) -> None:
        """Take over what an earlier supervisor wrote, the oldest first."""
        for event in events:
            self._events.append(event)
            self.last = max(self.last, number(event))

    def broken_off(self) -> dict[str, Any] | None:
        """Return the last event of a story that has no end: who wrote it was killed. To be asked before this supervisor adds to it."""
        for event in reversed(self._events):
            if event.get("event") in _ENDS:
                return None
            if event.get("event") == _BEGIN:
                break
        return self._events[-1] if self._events else None

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
