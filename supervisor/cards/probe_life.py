"""The probe's process as the supervisor sees it: killed when silent, started again with growing delays, never waited for.

A probe that hangs does so in the driver, where SIGKILL may not reach it. So the next one is started beside a killed one that does not
end, and goes round the card on which the first one hangs; but no more than MAX_STUCK of them: then the driver hangs for everybody, and
another process would only be one more. Meanwhile card health is unknown, and workers go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: No message for so long: it hangs.
SILENT_S: Final = 5.0
#: The first message may take longer: without persistence mode the driver wakes each card first.
START_S: Final = 30.0
#: Delays before the next start after so many failures in a row; the last one repeats.
DELAYS_S: Final = (5.0, 10.0, 30.0, 60.0)
#: A probe that spoke for so long starts from the first delay again.
STABLE_S: Final = 120.0
#: Killed probes that have not ended.
MAX_STUCK: Final = 2
#: The supervisor's own loop came round so late that the silence it sees is its own.
_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class SpawnProbe:
    """Start a probe."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class KillProbe:
    """Send SIGKILL to a probe."""

    epoch: int
    reason: str


ProbeCommand = SpawnProbe | KillProbe


class ProbeLife:
    """State of the probe's processes. Methods return commands; `epoch` numbers the processes, and only the last one is believed."""

    def __init__(self, first_epoch: int = 0) -> None:
        self.epoch = first_epoch
        self.failures = 0
        self.stuck: set[int] = set()
        self._stopping = False
        self._running = False
        self._first_at: float | None = None  # its first message
        self._silent_at = 0.0
        self._due_at: float | None = None

    def start(self, now: float) -> list[ProbeCommand]:
        """Start the first one."""
        return self._spawn("start", now)

    def heard(self, epoch: int, now: float) -> bool:
        """Note a message; False if it is from one that was given up, and not to be believed."""
        if epoch != self.epoch or not self._running:
            return False
        self._first_at = now if self._first_at is None else self._first_at
        self._silent_at = now + SILENT_S
        return True

    def ended(self, epoch: int, now: float) -> None:
        """Note the end of a process, or that it could not be started; plan the next start."""
        self.stuck.discard(epoch)
        if epoch == self.epoch and self._running:
            self._failed(now)

    def tick(self, now: float, *, late_s: float = 0.0) -> list[ProbeCommand]:
        """Kill it when it is silent; start the next one when its time has come.

        Args:
            now: monotonic.
            late_s: how late the supervisor itself was; after a pause the probe gets its time anew.
        """
        if self._running and late_s > _PAUSE_S:
            self._silent_at = max(self._silent_at, now + SILENT_S)
        if self._running and now >= self._silent_at:
            limit = START_S if self._first_at is None else SILENT_S
            self._failed(now)
            self.stuck.add(self.epoch)
            return [KillProbe(self.epoch, f"no message for {limit:g} s")]
        if self._due_at is not None and now >= self._due_at and len(self.stuck) < MAX_STUCK:
            return self._spawn("back-off is over", now)
        return []

    def stop(self) -> list[ProbeCommand]:
        """End it for good: the pool stops. It has nothing to lose, so it is not asked first."""
        self._stopping, self._due_at = True, None
        if not self._running:
            return []
        self._running = False
        return [KillProbe(self.epoch, "the pool stops")]

    def _spawn(self, reason: str, now: float) -> list[ProbeCommand]:
        self.epoch += 1
        self._running, self._first_at, self._silent_at, self._due_at = True, None, now + START_S, None
        return [SpawnProbe(self.epoch, reason)]

    def _failed(self, now: float) -> None:
        stable = self._first_at is not None and now >= self._first_at + STABLE_S
        self.failures = 1 if stable else self.failures + 1
        self._running = False
        if not self._stopping:
            self._due_at = now + DELAYS_S[min(self.failures, len(DELAYS_S)) - 1]
