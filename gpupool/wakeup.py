"""Wakes a reader thread; safe from a finalizer that the collector runs in the middle of any other call here.

`threading.Event` is not: its lock is no re-entrant one, and collection may run while this very thread holds it.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue


class Wakeup:
    """An Event for one reader: `wait` uses up what `set` gave; `clear` before looking, so that what comes later wakes anew."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()  # its put is documented to be re-entrant
        self._rung = False

    def set(self) -> None:
        """Wake the reader, now or when it next waits. At most one ring of each thread waits."""
        if not self._rung:
            self._rung = True
            self._rings.put(None)

    def clear(self) -> None:
        """Let the next `set` wake again."""
        self._rung = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a `set`; returns whether one came in time."""
        try:
            self._rings.get(timeout=timeout_s)
        except Empty:
            return False
        return True
