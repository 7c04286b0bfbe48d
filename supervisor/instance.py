"""One pool per runtime directory: the directory, its lock, and the proof that an earlier pool's children are gone."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpupool.paths import RuntimeDir

#: Children of a killed supervisor die with it at once, unless the kernel holds them. Longer than this we do not wait.
_LEFTOVER_WAIT_S: Final = 20.0


class AlreadyRunning(Exception):
    """Another pool holds this runtime directory."""


class LeftoverProcesses(Exception):
    """An earlier pool's supervisor is gone, but not all of its children."""


class Instance:
    """The hold on a runtime directory. `life_fd` is to be inherited by every child.

    Raises:
        AlreadyRunning: another supervisor lives here.
        LeftoverProcesses: children of the last one do not end.
        PermissionError: the directory belongs to somebody else, or others may write to it.
        OSError: it cannot be made.
    """

    def __init__(self, runtime: RuntimeDir) -> None:
        self.runtime = runtime
        _make_private(runtime.path)
        self._lock_fd = _open(runtime.lock)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "?"
            os.close(self._lock_fd)
            raise AlreadyRunning(f"another pool (pid {holder}) runs with the runtime directory {runtime.path}") from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        try:
            self.life_fd = _take_life(runtime.path / "life")
        except BaseException:
            os.close(self._lock_fd)
            raise
        for path in (runtime.control, runtime.workers, runtime.xid):
            with suppress(FileNotFoundError):
                path.unlink()

    def close(self) -> None:
        """Leave nothing behind but the directory. The lock file stays: unlinking it would let two hold it."""
        for path in (self.runtime.control, self.runtime.workers, self.runtime.xid):
            with suppress(FileNotFoundError):
                path.unlink()
        os.close(self.life_fd)
        os.close(self._lock_fd)


def _take_life(path: Path) -> int:
    """Lock the life file through a description of its own; children inherit it and so hold the lock as long as they live."""
    fd = _open(path)
    deadline = time.monotonic() + _LEFTOVER_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise LeftoverProcesses(
                    f"processes of an earlier pool are still alive after {_LEFTOVER_WAIT_S:g} s; see: fuser {path}"
                ) from None
            time.sleep(0.05)
        else:
            return fd


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _make_private(path: Path) -> None:
    """Make the directory, or check that nobody else could have put things into it: others would speak for our workers."""
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"runtime directory {path} is there and is no directory") from None
    stat = path.lstat()
    if stat.st_uid != os.geteuid():
        raise PermissionError(f"runtime directory {path} belongs to uid {stat.st_uid}, not to us ({os.geteuid()})")
    if stat.st_mode & 0o022:
        raise PermissionError(f"runtime directory {path} may be written by others (mode {stat.st_mode & 0o777:o}); use 0750")
