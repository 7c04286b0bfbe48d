"""What a worker tells of itself once a second, part by part: for people and metrics, never for decisions about work.

It goes over the channel, since the board's words are for what others decide by. Whoever has something to tell adds a part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from gpupool.channel import Channel
from gpupool.logs import Log

EVERY_S: Final = 1.0

Part = Callable[[], Any]


class Report:
    """The parts by name; each makes a small value of plain types, and may be called from the beat's thread at any time."""

    def __init__(self, channel: Channel, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._log = log
        self._clock = clock
        self._parts: dict[str, Part] = {}
        self._broken: set[str] = set()
        self._due = 0.0

    def add(self, name: str, part: Part) -> None:
        """Tell this part from now on."""
        self._parts[name] = part

    def tick(self) -> None:
        """Send a report if one is due. Never raises, never waits: one that cannot be sent is not missed."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + EVERY_S
        message: dict[str, Any] = {"t": "report"}
        for name, part in list(self._parts.items()):
            try:
                message[name] = part()
            except Exception as e:  # a part that fails must not silence the beat
                if name not in self._broken:
                    self._broken.add(name)
                    self._log.event.error("report_part_failed", part=name, exc_info=e)
        try:
            self._channel.send(message)
        except (ValueError, TypeError) as e:  # too large, or no plain type
            if "" not in self._broken:
                self._broken.add("")
                self._log.event.error("report_unsendable", error=str(e))
