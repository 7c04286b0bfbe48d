"""A bounded queue of log records: putting one never blocks and never raises; when it is full the oldest of the least important gives way.

Each way out of a process (the log's lines, the Fluentd forward) has one of its own, so that none of them costs another its records.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Final

_MAJOR: Final = frozenset({"warning", "error", "critical"})

Record = dict[str, Any]
#: A record with its weight when it was put: other readers of the same record may add to it.
_Entry = tuple[Record, int]


class LogQueue:
    """Records of two kinds: minor (debug, info) and major (warning and above).

    Args:
        size: how many records may wait.
        max_bytes: how much text may wait in them, about; 0: not looked at, which spares each put the counting.
    """

    def __init__(self, size: int, max_bytes: int = 0) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._bytes = 0
        self._minor: deque[_Entry] = deque()
        self._major: deque[_Entry] = deque()
        self._lock = threading.Lock()
        self._untold: Counter[str] = Counter()
        #: Set when something was put; the reader clears it, and whoever wants to wake the reader sets it.
        self.filled = threading.Event()
        #: Records lost, by level.
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._minor) + len(self._major)

    def put(self, record: Record) -> None:
        """Queue one record. No wait, no exception."""
        major = record.get("level") in _MAJOR
        weight = _weight(record) if self._max_bytes else 0
        with self._lock:
            while len(self._minor) + len(self._major) >= self._size or (weight and self._bytes + weight > self._max_bytes):
                if not self._minor and not (major and self._major):
                    self._lost(record)
                    return
                self._lost(self._taken(self._minor or self._major))
            (self._major if major else self._minor).append((record, weight))
            self._bytes += weight
        if not self.filled.is_set():
            self.filled.set()

    def take(self, most: int) -> list[Record]:
        """Return the next records. In order of time, as far as two queues can tell: neither kind waits behind the whole of the other."""
        minor, major = self._minor, self._major
        taken: list[Record] = []
        with self._lock:
            while len(taken) < most and (minor or major):
                first = not major or (minor and minor[0][0].get("time", 0) <= major[0][0].get("time", 0))
                taken.append(self._taken(minor if first else major))
        return taken

    def lose(self, records: Iterable[Record]) -> None:
        """Count records that were taken but could not be brought out."""
        with self._lock:
            for record in records:
                self._lost(record)

    def take_losses(self) -> Counter[str]:
        """Return what was lost since the last call, by level: it is to be told now."""
        if not self._untold:
            return self._untold
        with self._lock:
            told, self._untold = self._untold, Counter()
        return told

    def put_back_losses(self, told: Counter[str]) -> None:
        """Undo `take_losses`: they could not be told."""
        with self._lock:
            self._untold += told

    def _taken(self, queue: deque[_Entry]) -> Record:
        record, weight = queue.popleft()
        self._bytes -= weight
        return record

    def _lost(self, record: Record) -> None:
        level = str(record.get("level", "info"))
        self.dropped[level] += 1
        self._untold[level] += 1


def _weight(record: Record) -> int:
    """About how many bytes a record holds: its texts, and a word for all else."""
    return 32 * len(record) + sum([len(value) for value in record.values() if type(value) is str])
