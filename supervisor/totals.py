"""What workers have counted, added up over their processes: a count of a slot never goes back when its process is replaced."""

from __future__ import annotations


class Totals:
    """One counter, by slot. What a process has counted since its last report is lost with it: at most a second's worth."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}  # of processes that have ended
        self._now: dict[int, int] = {}  # of the present one, as it last told

    def update(self, slot: int, count: int) -> None:
        """Take over what the slot's present process has counted so far."""
        self._now[slot] = max(count, self._now.get(slot, 0))

    def ended(self, slot: int) -> None:
        """The slot's process is gone; its successor counts from 0."""
        self._before[slot] = self.of(slot)
        self._now.pop(slot, None)

    def of(self, slot: int) -> int:
        """Return the count of all the slot's processes."""
        return self._before.get(slot, 0) + self._now.get(slot, 0)
