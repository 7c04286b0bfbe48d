"""systemd's notification protocol: one datagram per message to $NOTIFY_SOCKET, and nothing at all where there is none.

Every word says what is, not what is hoped for: READY once requests would be served, WATCHDOG from a loop that has just turned, and more
time only while something is on its way. Messages and their meaning: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import math
import os
import socket
from collections import deque
from collections.abc import Mapping
from typing import Final

#: Pings per watchdog period: two may be lost or late before the third is missed.
_PINGS: Final = 3
#: The time asked for, and how often it is asked for again.
_EXTEND_S: Final = 30.0
_EXTEND_EVERY_S: Final = 10.0
#: A reload reads one file and hashes models. The command that asked gives up after this time; so do we.
_RELOAD_S: Final = 120.0
#: Messages that wait for room in the manager's socket. More there cannot sensibly be: only the newest status waits.
_MAX_OWED: Final = 16
_USEC: Final = 1_000_000


class Notifier:
    """Sends state to the service manager. Never raises, never blocks; `now` is CLOCK_MONOTONIC in seconds."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None
        self._ping_every_s = _watchdog_s(environment) / _PINGS if address else math.inf
        self._pinged_at = self._extended_at = self._busy_until = -math.inf
        self._serving = self._stopping = False
        self._status = ""
        self._owed: deque[dict[str, str | int]] = deque(maxlen=_MAX_OWED)

    @property
    def tick_within_s(self) -> float:
        """How often `tick` must be called at least; infinity where nobody listens."""
        return min(self._ping_every_s, _EXTEND_EVERY_S) if self._socket else math.inf

    def send(self, **values: str | int) -> bool:
        """Send `KEY=value` lines in one datagram; False when the manager had no room for it."""
        if self._socket is None:
            return True
        text = "\n".join(f"{key}={value}" for key, value in values.items())
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError:
            return False
        return True

    def status(self, text: str) -> None:
        """Send STATUS when it has changed."""
        if self._status != text:
            self._status = text
            if older := next((message for message in self._owed if "STATUS" in message), None):
                self._owed.remove(older)
            self._owe(STATUS=text)

    def ready(self) -> None:
        """Say that the pool serves: the start is finished."""
        self._serving = True
        self._owe(READY=1)

    def stopping(self, now: float, *, within_s: float) -> None:
        """Say that the pool stops, and ask for more time until `within_s` have passed."""
        if not self._stopping:
            self._stopping, self._busy_until = True, now + within_s
            self._owe(STOPPING=1)

    def reloading(self, now: float) -> None:
        """Say that a reload begins. Before the pool serves, and while it stops, a reload is nothing that a manager must know."""
        if self._serving and not self._stopping:
            self._busy_until = now + _RELOAD_S
            self._owe(RELOADING=1, MONOTONIC_USEC=int(now * _USEC))

    def reloaded(self) -> None:
        """Say that the reload is over; a refused one too, for the pool serves on."""
        if self._serving and not self._stopping:
            self._busy_until = -math.inf
            self._owe(READY=1)

    def tick(self, now: float, *, loading: bool) -> None:
        """Ping the watchdog when that is due; while the pool loads, reloads or stops, ask for more time.

        To be called by the loop that does the work, after it has done it: the ping of any other thread would prove nothing.
        """
        self._pay()
        if now >= self._pinged_at + self._ping_every_s:
            self._pinged_at = now
            self.send(WATCHDOG=1)
        if (loading or now < self._busy_until) and now >= self._extended_at + _EXTEND_EVERY_S:
            self._extended_at = now
            self.send(EXTEND_TIMEOUT_USEC=int(_EXTEND_S * _USEC))

    def close(self) -> None:
        """Say nothing more."""
        if self._socket is not None:
            self._socket.close()

    def _owe(self, **values: str | int) -> None:
        """Send what the manager must not miss: now, or in order with a later tick."""
        self._owed.append(values)
        self._pay()

    def _pay(self) -> None:
        while self._owed and self.send(**self._owed[0]):
            self._owed.popleft()


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Read the watchdog's period; infinity when there is none, or when it is meant for another process."""
    period, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not period.isascii() or not period.isdigit() or int(period) == 0 or pid not in ("", str(os.getpid())):
        return math.inf
    return int(period) / _USEC
