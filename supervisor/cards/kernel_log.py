"""Follows the kernel's log for what the driver reports there: some of the worst faults are told nowhere else."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from .xid import KernelXid, parse_kernel_line

KMSG: Final = Path("/dev/kmsg")
#: The kernel gives one record per read and refuses a smaller buffer.
_READ_BYTES: Final = 8192
_POLL_S: Final = 0.5
#: After a read that failed.
_PAUSE_S: Final = 5.0


class KernelLog:
    """The log from now on; a thread calls `on_xid` for each fault.

    Raises:
        OSError: not readable, as under systemd's ProtectKernelLogs= or without the right to.
    """

    def __init__(self, on_xid: Callable[[KernelXid], None], path: Path = KMSG) -> None:
        self._on_xid = on_xid
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # What happened before us was either handled by the last supervisor, or the card's recovery action still tells of it.
        with suppress(OSError):
            os.lseek(self._fd, 0, os.SEEK_END)
        self._held = b""
        self._stopped = threading.Event()
        threading.Thread(target=self._follow, name="kernel-log", daemon=True).start()

    def close(self) -> None:
        """Stop following."""
        self._stopped.set()

    def _follow(self) -> None:
        while not self._stopped.is_set():
            ready = select.select([self._fd], [], [], _POLL_S)[0]
            if not ready:
                continue
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                continue
            except BrokenPipeError:
                continue  # records were overwritten before we came to read them; the next ones follow
            except OSError:
                data = b""
            if not data:
                self._stopped.wait(_PAUSE_S)
            for fault in self._faults(data):
                self._on_xid(fault)

    def _faults(self, data: bytes) -> list[KernelXid]:
        *lines, self._held = (self._held + data).split(b"\n")
        self._held = self._held[-_READ_BYTES:]
        # "prefix;text", and further lines of a record, which begin with a blank, tell of the device and not of the fault.
        texts = (line.decode("utf-8", "replace").partition(";")[2] for line in lines if not line.startswith(b" "))
        return [fault for text in texts if (fault := parse_kernel_line(text))]
