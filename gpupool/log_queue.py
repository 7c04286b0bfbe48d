"""A bounded queue of log records: putting one never blocks and never raises; when it is full the oldest of the least important gives way.

Garbage collection may run in the middle of any call here, and a finalizer may log: a thread that is already inside hands such a record to a
deque, which the next call empties.

Each way out of a process (the log's lines, the Fluentd forward) has one of its own, so that none of them costs another its records.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from gpupool.wakeup import Wakeup

_MAJOR: Final = frozenset({"warning", "error", "critical"})
#: Records of finalizers that may wait for the call they interrupted.
_MAX_LATE: Final = 100
#: What nests deeper is not weighed; a record may hold itself.
_MAX_DEPTH: Final = 8

Record = dict[str, Any]
#: A record with its weight when it was put: other readers of the same record may add to it.
_Entry = tuple[Record, int]


class LogQueue:
    """Records of two kinds: minor (debug, info) and major (warning and above).

    Args:
        size: how many records may wait.
        max_bytes: how much text may wait in them, about; 0: not looked at.
    """

    def __init__(self, size: int, max_bytes: int = 0) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._bytes = 0
        self._minor: deque[_Entry] = deque()
        self._major: deque[_Entry] = deque()
        self._lock = threading.RLock()
        self._inside = False  # seen by who holds the lock: set, it is this same thread, further out
        self._late: deque[Record] = deque()
        self._ended = False
        self._untold: Counter[str] = Counter()
        #: Set when something was put; the reader clears it, and whoever wants to wake the reader sets it.
        self.filled = Wakeup()
        #: Records lost, by level.
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._minor) + len(self._major)

    def put(self, record: Record) -> None:
        """Queue one record. No wait, no exception."""
        weight = _weight(record) if self._max_bytes else 0
        with self._lock:
            if self._inside:
                if len(self._late) < _MAX_LATE:
                    self._late.append(record)
                else:
                    self._lost(record)
            else:
                self._inside = True
                try:
                    self._add(record, weight)
                finally:
                    self._inside = False
        self.filled.set()

    def take(self, most: int) -> list[Record]:
        """Return the next records. In order of time, as far as two queues can tell: neither kind waits behind the whole of the other."""
        minor, major = self._minor, self._major
        taken: list[Record] = []
        with self._entered():
            while len(taken) < most and (minor or major):
                first = not major or (minor and minor[0][0].get("time", 0) <= major[0][0].get("time", 0))
                taken.append(self._taken(minor if first else major))
        return taken

    def lose(self, records: Iterable[Record]) -> None:
        """Count records that were taken but could not be brought out."""
        with self._entered():
            for record in records:
                self._lost(record)

    def take_losses(self) -> Counter[str]:
        """Return what was lost since the last call, by level: it is to be told now."""
        if not self._untold:
            return self._untold
        with self._entered():
            told, self._untold = self._untold, Counter()
        return told

    def put_back_losses(self, told: Counter[str]) -> None:
        """Undo `take_losses`: they could not be told."""
        with self._entered():
            self._untold += told

    def end(self) -> None:
        """Nobody reads any more: what waits and whatever comes counts as lost."""
        with self._entered():
            self._ended = True
            while self._minor or self._major:
                self._lost(self._taken(self._minor or self._major))

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Hold the lock, and first take in what finalizers have logged. Not for them."""
        with self._lock:
            self._inside = True
            try:
                while self._late:
                    record = self._late.popleft()
                    self._add(record, _weight(record) if self._max_bytes else 0)
                yield
            finally:
                self._inside = False

    def _add(self, record: Record, weight: int) -> None:
        major = record.get("level") in _MAJOR
        if self._ended or (self._max_bytes and weight > self._max_bytes):
            self._lost(record)
            return
        while len(self._minor) + len(self._major) >= self._size or (weight and self._bytes + weight > self._max_bytes):
            if not self._minor and not (major and self._major):
                self._lost(record)
                return
            self._lost(self._taken(self._minor or self._major))
        (self._major if major else self._minor).append((record, weight))
        self._bytes += weight

    def _taken(self, queue: deque[_Entry]) -> Record:
        record, weight = queue.popleft()
        self._bytes -= weight
        return record

    def _lost(self, record: Record) -> None:
        level = str(record.get("level", "info"))
        self.dropped[level] += 1
        self._untold[level] += 1


def _weight(record: Record) -> int:
    """About how many bytes a record holds: its texts, those within lists and dicts too, and a word for all else."""
    size = 32 * len(record)
    for value in record.values():
        kind = type(value)
        if kind is str:
            size += len(value)
        elif kind is not int and kind is not float:
            size += _nested(value, 1)
    return size


def _nested(value: Any, depth: int) -> int:
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    if depth < _MAX_DEPTH:
        try:
            if isinstance(value, dict):
                return sum([64 + _nested(k, depth + 1) + _nested(v, depth + 1) for k, v in value.items()])
            if isinstance(value, (list, tuple, set, frozenset, deque)):
                return sum([32 + _nested(v, depth + 1) for v in value])
        except RuntimeError:  # another thread changes it meanwhile
            pass
    return 0
