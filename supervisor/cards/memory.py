"""Has a dead process's memory come back on its card? The next one would else start into somebody else's rest and run out."""

from __future__ import annotations

from typing import Final

from .reading import CardReading

#: The driver frees a dead process's memory within seconds; after this time the next start is tried all the same.
PATIENCE_S: Final = 20.0
#: What may be more in use than before the process came: contexts of others, the driver's own needs.
TOLERANCE: Final = 0.02


class MemoryReturn:
    """Remembers, by device, what was in use before the present process."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._ended_at: dict[str, float] = {}

    def started(self, uuid: str, reading: CardReading | None) -> None:
        """A process was started on a device; the first time this tells what is in use without us."""
        self._ended_at.pop(uuid, None)
        if uuid not in self._before and reading is not None and reading.memory_used_bytes is not None:
            self._before[uuid] = reading.memory_used_bytes

    def ended(self, uuid: str, now: float) -> None:
        """The process has ended."""
        self._ended_at[uuid] = now

    def refusal(self, uuid: str, reading: CardReading | None, now: float) -> str | None:
        """Say that a start should wait, for at most PATIENCE_S after the end; without readings it never does."""
        ended_at, before = self._ended_at.get(uuid), self._before.get(uuid)
        if ended_at is None or before is None or now > ended_at + PATIENCE_S:
            return None
        if reading is None or reading.memory_used_bytes is None or reading.memory_total_bytes is None:
            return None
        kept = reading.memory_used_bytes - before
        if kept <= TOLERANCE * reading.memory_total_bytes:
            return None
        return f"its card still holds {kept / 2**30:.1f} GiB of the last process"
