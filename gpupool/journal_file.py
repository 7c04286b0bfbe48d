"""The journal's file: JSON lines in two halves of a bounded size, written by a thread of its own, read with distrust.

Nothing here waits for a disk but the thread, and nothing raises: what cannot be written is counted, and the newest events are in memory.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gpupool.journal import HALF_BYTES, parse
from gpupool.wakeup import Wakeup

#: Lines that may wait for a slow disk.
_WAITING: Final = 1000
#: Beside the control socket there is a link of this name to the file, so that commands find it when no pool runs.
LINK: Final = "events.jsonl"
_STATE: Final = Path("/var/lib")


class JournalFile:
    """Appends lines to `path`; when that is full it becomes `path`.1 in place of the one before."""

    def __init__(self, path: Path, *, half_bytes: int = HALF_BYTES) -> None:
        self.path = path
        self._half_bytes = half_bytes
        self._lines: deque[bytes] = deque()
        self._untaken = self._unwritten = 0  # one of each thread's
        self._filled = Wakeup()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that did not come into the file."""
        return self._untaken + self._unwritten

    def put(self, line: bytes) -> None:
        """Queue one line, its end of line included."""
        if len(self._lines) >= _WAITING:
            self._untaken += 1
            return
        self._lines.append(line)
        self._filled.set()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, for at most `timeout_s`."""
        self._closing = True
        self._filled.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._filled.wait()
            self._filled.clear()
            while self._lines:
                lines = [self._lines.popleft() for _ in range(min(100, len(self._lines)))]
                try:
                    self._append(b"".join(lines))
                except OSError:
                    self._unwritten += len(lines)
            if self._closing:
                return

    def _append(self, data: bytes) -> None:
        # Opened each time: events are rare, and a file that was moved, removed or cut meanwhile is made anew.
        with suppress(FileNotFoundError):
            if self.path.lstat().st_size + len(data) > self._half_bytes:
                self.path.replace(before(self.path))
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o640)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a line broke off there: ours must begin a line of its own
                data = b"\n" + data
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)


def before(path: Path) -> Path:
    """Name the older half."""
    return path.with_name(path.name + ".1")


def read(path: Path, *, half_bytes: int = HALF_BYTES) -> list[dict[str, Any]] | None:
    """Read both halves, the oldest event first; None when there is neither. At most their size is read.

    Raises:
        OSError: one is there and cannot be read.
    """
    events: list[dict[str, Any]] | None = None
    for half in (before(path), path):
        try:
            fd = os.open(half, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        with os.fdopen(fd, "rb") as f:
            f.seek(max(0, os.fstat(fd).st_size - half_bytes))
            events = [*(events or ()), *parse(f.read(half_bytes))]
    return events


def link(runtime: Path, path: Path) -> None:
    """Let the runtime directory point to the file, so that commands find it."""
    place = runtime / LINK
    if place == path:
        return
    temporary = runtime / f".{LINK}.new"
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path)
        temporary.replace(place)


def find(runtime: Path) -> Path | None:
    """Find the file of the pool that had this runtime directory.

    After a boot the directory is gone; then it is looked for where systemd keeps the state of a service with such a directory.
    """
    place = runtime / LINK
    with suppress(OSError):
        if place.is_symlink():  # also where it leads to what may not be read: then that is what is told
            return place.resolve()
    with suppress(OSError):
        for folder in (runtime, _STATE / runtime.name):
            if found := sorted(folder.glob("*.events.jsonl")):
                return found[0]
    return None
