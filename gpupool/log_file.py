"""Where lines go: a descriptor that was given, or a file that may be renamed under us.

A rotation that renames the file and makes a new one (logrotate's `create`) needs no signal: at most once a second, and after a write
that failed, the path is looked at, and when it names another file that one is opened. What is written in between stands in the renamed
file, so no line is lost and none is written twice. `copytruncate` loses what comes between its two steps: do not use it.
"""

from __future__ import annotations

import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

#: How long one write may wait for a full pipe before its records count as dropped.
_WRITE_TIMEOUT_MS: Final = 200
_LOOK_EVERY_S: Final = 1.0
#: Appends to a file are whole whatever their size; each one costs the program's other threads a turn.
_FILE_BYTES: Final = 64 << 10
# Not waiting: a named pipe without a reader is refused, and would else hold the start for ever.
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


class LogFile:
    """Writes whole lines. Used by one thread.

    Args:
        fd: where lines go when there is no path; it may be a file, a pipe, a socket or a terminal, blocking or not.
        path: a file to append to.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, fd: int, path: str = "") -> None:
        self._path = path
        self._fd = os.open(path, _FLAGS, 0o640) if path else fd
        self._looked_at = time.monotonic()
        self._torn = False
        self._gone = False  # the file was deleted and there is none in its place: what is written there nobody will read
        self._doubted = True  # whether the file ends with a whole line
        try:
            self._is_file = stat.S_ISREG(os.fstat(self._fd).st_mode)
        except OSError:  # a descriptor that is closed: each write will fail, and be counted
            self._is_file = False

    @property
    def write_bytes(self) -> int:
        """How much may go into one write of several lines."""
        return _FILE_BYTES if self._is_file else select.PIPE_BUF

    def look(self) -> None:
        """Open the path again if it names another file now, or none.

        Also when there is nothing to write: a file that was deleted holds its room on the disk while it is open.
        """
        if not self._path:
            return
        self._looked_at = time.monotonic()
        mine = None
        with suppress(OSError):  # closed by others
            mine = os.fstat(self._fd)
        # Where no other can be opened, since the folder is away, or its rights: an old file that still has a name takes the lines.
        self._gone = bool(mine and mine.st_nlink == 0)
        with suppress(OSError):
            there = Path(self._path).stat()
            if mine and (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev):
                return
        with suppress(OSError):
            fresh = os.open(self._path, _FLAGS, 0o640)
            old, self._fd, self._torn, self._doubted, self._gone = self._fd, fresh, False, True, False
            if mine:
                os.close(old)

    def write(self, lines: bytes) -> int:
        """Write whole lines; returns how many bytes went out, all of them or those before it failed."""
        if self._path and time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self.look()
        written = 0 if self._gone else self._write(lines)
        if written < len(lines):
            self._doubted = True
            self.look()
        return written

    def _ends_torn(self) -> bool:
        """Whether the file ends within a line: another process writes there, too, and the disk may have become full for both."""
        try:
            size = os.fstat(self._fd).st_size
            # Ours may be for writing only.
            reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return self._torn
        try:
            return size > 0 and os.pread(reader, 1, size - 1) != b"\n"
        except OSError:
            return self._torn
        finally:
            os.close(reader)

    def _write(self, lines: bytes) -> int:
        if self._doubted and self._is_file:
            self._torn = self._ends_torn()
        self._doubted = False
        left = b"\n" + lines if self._torn else lines
        while left:
            try:
                written = os.write(self._fd, left)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                if not poll.poll(_WRITE_TIMEOUT_MS):
                    break
            except (OSError, ValueError):
                break
            else:
                # What follows a line that broke off in the middle must begin a line of its own.
                self._torn = not left[:written].endswith(b"\n")
                left = left[written:]
        return max(0, len(lines) - len(left))
