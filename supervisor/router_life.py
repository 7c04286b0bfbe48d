"""The router's process as the pool sees it: one at a time, started again without delay at first, given up only if it never ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .commands import Command, KillRouter, SpawnRouter, TellRouter

#: Delays before the next start after so many deaths in a row; the router serves everyone, so the first is none.
DELAYS_S: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
#: A router that lived so long starts from the first delay again.
STABLE_S: Final = 10.0
#: How long it may take to answer what is left and to flush.
STOP_S: Final = 2.5
#: How long a start may take until its sockets are bound; a loaded host imports slowly.
START_S: Final = 30.0


class RouterLife:
    """State of the router's process. Methods return commands; `epoch` numbers the processes."""

    def __init__(self) -> None:
        self.epoch = 0
        self.running = False  # a process exists
        self.up = False
        self.bind: Sequence[str] = ()
        self.failures = 0
        self.stopping = False
        self.late = False  # its beat is missing
        self._killed = False
        self._spawned_at = 0.0
        self._up_at: float | None = None
        self._due_at: float | None = None
        self._stop_ends_at = 0.0

    def spawn(self, reason: str, now: float) -> list[Command]:
        """Start the next process."""
        self.epoch += 1
        self._spawned_at = now
        self.running, self.up, self.late, self._killed, self._due_at = True, False, False, False, None
        return [SpawnRouter(self.epoch, reason)]

    def bound(self, bind: Sequence[str], now: float) -> None:
        """Note that its sockets are bound."""
        self.up, self.bind, self._up_at = True, bind, now

    def ended(self, now: float, *, again: bool) -> list[Command]:
        """Note its end; plan the next start if it is to run again."""
        lived = self._up_at is not None and now >= self._up_at + STABLE_S
        self.running, self.up, self._up_at = False, False, None
        self.failures = 1 if lived else self.failures + 1
        if not again:
            return []
        delay = DELAYS_S[min(self.failures, len(DELAYS_S)) - 1]
        if not delay:
            return self.spawn("died", now)
        self._due_at = now + delay
        return []

    def stop(self, reason: str, now: float) -> list[Command]:
        """Have it answer what is left and end. Asking twice is asking once.

        One that has not yet said that it is up may serve already, and its clients wait for an answer.
        """
        if self.stopping or not self.running:
            return []
        self.stopping, self._stop_ends_at = True, now + STOP_S
        return [TellRouter({"t": "stop"}, reason)]

    def watch(self, beat: float, now: float, *, late_s: float, dead_s: float, since: float) -> list[Command]:
        """Judge its beat, which comes from the loop that does its work.

        Args:
            beat: the instant of the last one; that of an earlier process counts for nothing.
            now: the present.
            late_s: without a beat for so long, it does not count as serving.
            dead_s: without one for so long, it is killed: nobody is served meanwhile, and a new one serves in a moment.
            since: ages begin no earlier (the supervisor itself was paused until then).
        """
        if self._killed or not self.running:
            return []
        age = now - max(beat if self.up else 0.0, self._spawned_at, self._up_at or 0.0, since)
        self.late = self.up and age > late_s
        if age <= (dead_s if self.up else max(dead_s, START_S)):
            return []
        self._killed = True
        return [KillRouter(self.epoch, f"no beat for {age:.1f} s")]

    def deaf(self) -> list[Command]:
        """It does not take what it must know: only a new one can be told."""
        if not self.up or self._killed:
            return []
        self._killed = True
        return [KillRouter(self.epoch, "it does not read what it is told")]

    def tick(self, now: float, *, again: bool) -> list[Command]:
        """Start it when its delay is over; kill it when it does not stop."""
        if self._due_at is not None and now >= self._due_at and again:
            return self.spawn("died", now)
        if self.stopping and self.running and now >= self._stop_ends_at:
            self._stop_ends_at = now + STOP_S
            return [KillRouter(self.epoch, "did not stop in time")]
        return []

    def tell(self, kind: str, why: str = "", /, **fields: Any) -> list[Command]:
        """Send it a message, if it is there to hear it: a new one is told everything again when it is up."""
        return [TellRouter({"t": kind, **fields}, why)] if self.up and not self.stopping else []
