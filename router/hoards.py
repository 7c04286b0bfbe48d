"""Connections that send a message without end: libzmq keeps all of it in memory before it hands anything over, and no option bounds that.

What the kernel has received for a connection is compared with the messages that came of it. When that is more than any message may be and
none has come, the connection is cut, and with it goes what libzmq holds. Frames of a byte each weigh twenty times in memory what they do
on the wire; so while this process holds much that it cannot account for, a sixteenth of the limit must come to an end within a second.
All of that is looked at only while this process is large. Only TCP tells how much was received: whoever may open an ipc socket of ours
is trusted with our memory.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpupool.logs import Log

from .peers import Peers

#: Smaller than this the process holds nothing worth looking for.
_CALM_BYTES: Final = 256 << 20
#: What it may hold beside the bodies that it knows of before that is strange.
_STRANGE_BYTES: Final = 512 << 20
#: Looks within which a lesser hoard must end while that is so.
_PATIENT_LOOKS: Final = 5
_LESSER: Final = 16
#: The allocator keeps what was freed; giving it back takes some milliseconds.
_TRIM_EVERY_S: Final = 10.0
_STATM: Final = Path("/proc/self/statm")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
#: Where struct tcp_info (linux/tcp.h, since Linux 4.1) has tcpi_bytes_received.
_RECEIVED_AT: Final = 128
_RECEIVED: Final = struct.Struct("=Q")


class Hoards:
    """Looks for them, five times a second.

    Args:
        peers: the open connections.
        limit: bytes that a message may have, all frames together.
        log: told of each that is cut.
        held: bytes of bodies that this process knows to hold.
        received: bytes that came in at a descriptor; None when that cannot be told.
        cut: ends a connection.
        trim: gives freed memory back to the kernel.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        peers: Peers,
        limit: int,
        log: Log,
        held: Callable[[], int],
        *,
        received: Callable[[int], int | None] | None = None,
        cut: Callable[[int], None] | None = None,
        resident: Callable[[], int] | None = None,
        trim: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers, self._limit, self._log, self._held = peers, limit, log, held
        self._received = received or received_bytes
        self._cut = cut or cut_connection
        self._resident = resident or resident_bytes
        self._trim = trim or trim_heap
        self._clock = clock
        self._trim_at = 0.0
        self.total = 0

    def look(self) -> None:
        """Cut those that hoard; cheap while this process is small."""
        resident = self._resident()
        if resident < _CALM_BYTES:
            return
        strange = resident - self._held()
        if strange > _CALM_BYTES and (now := self._clock()) >= self._trim_at:
            self._trim_at = now + _TRIM_EVERY_S
            self._trim()
            strange = self._resident() - self._held()
        limit = self._limit // _LESSER if strange > _STRANGE_BYTES else self._limit
        for fd, size, looks in self._peers.hoarding(self._received, limit):
            if size > self._limit or looks >= _PATIENT_LOOKS:
                self.total += 1
                self._log.event.warning("endless_message_cut", received_bytes=size, limit=self._limit, total=self.total)
                self._cut(fd)


def resident_bytes() -> int:
    """Memory of this process; 0 when it cannot be told."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def trim_heap() -> None:
    """Give freed memory back to the kernel, where the allocator is one that can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def received_bytes(fd: int) -> int | None:
    """Bytes that TCP has received on a descriptor since its connection began."""
    with suppress(OSError, struct.error), socket.socket(fileno=os.dup(fd)) as sock:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
    return None


def cut_connection(fd: int) -> None:
    """End a connection whose descriptor is libzmq's: it sees the end, and closes it."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        sock.shutdown(socket.SHUT_RDWR)
