"""Ends a recording in the midst of a batch when it takes too much memory: a batch may make any number of records, and none can be told beforehand.

A thread looks at what malloc has given out, and has the main thread, to which the recording belongs, end it between two of its bytecodes.
A single call from Python that makes too many records is ended only when it returns. A malloc that is not glibc's (LD_PRELOAD) is not seen.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Final

#: How often it looks. torch makes at most 1000 records in a millisecond, of half a kB each (torch 2.13).
_INTERVAL_S: Final = 0.001
#: The calls that the interpreter may still make when their guard is gone; its queue of them holds 32 (Python 3.11).
_MOST_KEPT: Final = 64
_kept: list[object] = []


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def allocated() -> int:
    """Return what malloc has given out and not taken back, in bytes. Raises AttributeError where libc is not glibc 2.33 or newer."""
    info = _mallinfo2()()
    return int(info.uordblks + info.hblkhd)


class RecordingGuard:
    """Watches from `start` to `stop`, both called on the main thread.

    Args:
        most_bytes: how much more malloc may have given out than at the start.
        end: ends the recording; called on the main thread, once at most, and never after `stop`.
    """

    def __init__(self, most_bytes: int, end: Callable[[], None]) -> None:
        self._most = most_bytes
        self._end = end
        self._over = threading.Event()
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._called)

    def start(self) -> None:
        """Begin. Raises RuntimeError when there is no thread to be had, AttributeError as `allocated`."""
        threading.Thread(target=self._watch, args=(allocated() + self._most,), name="profile-guard", daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._over.set()

    def _watch(self, limit: int) -> None:
        # Asked again and again until it was heard: the queue of pending calls has a bound.
        while not self._over.wait(_INTERVAL_S):
            if allocated() > limit:
                _kept.append(self._call)
                del _kept[:-_MOST_KEPT]
                ctypes.pythonapi.Py_AddPendingCall(self._call, None)
                self._over.wait(0.05)

    def _called(self, _: object) -> int:
        if not self._over.is_set():
            self._over.set()
            self._end()
        return 0


def _mallinfo2() -> Callable[[], _Mallinfo2]:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo2
    return function
