"""Connections that send a message without end: libzmq keeps all of it in memory before it hands anything over, and no option bounds that.

What the kernel has received for a connection is compared with the messages that came of it. When that is more than any message may be and
none has come, the connection is cut, and with it goes what libzmq holds. That is looked at only while this process is large. Only TCP
tells how much was received: whoever may open an ipc socket of ours is trusted with our memory.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpupool.logs import Log

from .peers import Peers

#: Smaller than this the process holds nothing worth looking for.
_CALM_BYTES: Final = 256 << 20
_STATM: Final = Path("/proc/self/statm")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
#: Where struct tcp_info (linux/tcp.h, since Linux 4.1) has tcpi_bytes_received.
_RECEIVED_AT: Final = 128
_RECEIVED: Final = struct.Struct("=Q")


class Hoards:
    """Looks for them.

    Args:
        peers: the open connections.
        limit: bytes that a message may have, all frames together.
        log: told of each that is cut.
        received: bytes that came in at a descriptor; None when that cannot be told.
        cut: ends a connection.
    """

    def __init__(
        self,
        peers: Peers,
        limit: int,
        log: Log,
        *,
        received: Callable[[int], int | None] | None = None,
        cut: Callable[[int], None] | None = None,
    ) -> None:
        self._peers, self._limit, self._log = peers, limit, log
        self._received = received or received_bytes
        self._cut = cut or cut_connection
        self.total = 0

    def look(self, resident: int | None = None) -> None:
        """Cut those that hoard; cheap while this process is small. To be called some times a second."""
        if (resident_bytes() if resident is None else resident) < _CALM_BYTES:
            return
        for fd, size in self._peers.hoarding(self._received, self._limit):
            self.total += 1
            self._log.event.warning("endless_message_cut", received_bytes=size, limit=self._limit, total=self.total)
            self._cut(fd)


def resident_bytes() -> int:
    """Memory of this process; 0 when it cannot be told."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


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
