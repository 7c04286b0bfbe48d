"""Stacks of all threads on a signal, into a file of this process: by faulthandler, and so also while the main thread is deep in C code.

The first line of the file says which process writes it and which signal it listens to; what follows are the stacks, after each signal anew.
`gpupool stacks` reads it, where py-spy is not there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: In this order: the first that nobody else in the process has a handler for.
SIGNALS: Final = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGRTMAX)
_MAX_HEADER_BYTES: Final = 200


@dataclass(frozen=True, slots=True)
class Listener:
    """Who writes a file of stacks: its process, the signal that makes it write (0: it has none left), and where the stacks begin."""

    pid: int
    signal: int
    start: int


class StackDump:
    """This process's ear for the signal. A process that cannot write the file goes without.

    A model may have its own use for one of SIGNALS. It then keeps it, and the next one is taken; `listen` looks, and is cheap enough for each beat.
    """

    def __init__(self, path: str) -> None:
        self._signal = 0
        self._fd = -1
        if path:
            with suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(path, flags, 0o600)
        self._tell()
        self.listen()

    def listen(self) -> None:
        """Take another signal if ours has got a handler of somebody else's, and ours again if that one has put back what Python knew of."""
        if self._fd < 0:
            return
        if self._signal and _is_free(self._signal):
            if not _is_caught(self._signal):  # it would now end this process
                self._register_anew()
            return
        # The one that was lost is not unregistered: that would take it from who has it now.
        self._signal = next((number for number in SIGNALS if _is_free(number)), 0)
        if self._signal:
            faulthandler.register(self._signal, file=self._fd, all_threads=True)
        self._tell()

    def listen_anew(self) -> None:
        """Take the signal again although Python knows of no other handler: a model that loaded may have gone past it."""
        if self._signal and _is_free(self._signal):
            self._register_anew()
        self.listen()

    def _register_anew(self) -> None:
        faulthandler.unregister(self._signal)
        faulthandler.register(self._signal, file=self._fd, all_threads=True)

    def _tell(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
                os.write(self._fd, json.dumps({"pid": os.getpid(), "signal": self._signal}).encode() + b"\n")


def listener(path: Path) -> Listener | None:
    """Read who writes a file; None where nobody does.

    Raises:
        OSError: it may not be read.
    """
    try:
        with path.open("rb") as file:
            header = file.readline(_MAX_HEADER_BYTES)
        fields = json.loads(header)
        return Listener(int(fields["pid"]), int(fields["signal"]), len(header))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _is_free(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_DFL


def _is_caught(number: int) -> bool:
    """Whether the kernel knows of a handler; Python does not know of those that C code sets. True where it cannot be read."""
    try:
        with Path("/proc/self/status").open("rb") as status:
            caught = next(int(line.split()[1], 16) for line in status if line.startswith(b"SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return True
    return bool(caught >> (number - 1) & 1)
