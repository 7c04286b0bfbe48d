"""The worker's socket to the router: never waits, and starts anew for every router.

What the socket does not take at once is kept and sent when it does. That queue is bounded by the work that the router has given out.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Container, Iterator
from typing import Final

import zmq

_CUT: Final = zmq.Event.DISCONNECTED
#: Quick, because a router is back within a second; backing off, because it may not be.
_RECONNECT_MS: Final = 20
_RECONNECT_MAX_MS: Final = 500


class Dealer:
    """One DEALER socket at a time, registered with the link's poller."""

    def __init__(self, endpoint: str, poller: zmq.Poller) -> None:
        self._endpoint = endpoint
        self._poller = poller
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._unsent: deque[list[bytes]] = deque()
        self.socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def connect(self) -> None:
        """Open a new socket. What lies in the old one's pipes is for, or from, a router that is no more."""
        self._drop(linger_ms=0)
        self._unsent.clear()
        socket = self.socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.IMMEDIATE, 1)  # queue nothing for a peer that is not there
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._monitor = socket.get_monitor_socket(_CUT)
        self._poller.register(self._monitor, zmq.POLLIN)
        socket.connect(self._endpoint)
        self._poller.register(socket, zmq.POLLIN)

    def was_cut(self, ready: Container[object]) -> bool:
        """Whether the connection has ended without our doing; `ready` is what the poller has found readable."""
        if self._monitor is None or self._monitor not in ready:
            return False
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        return True

    def receive(self) -> Iterator[list[bytes]]:
        """Yield the messages that are there now."""
        socket = self.socket
        while socket is not None:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield frames

    def send(self, frames: list[bytes]) -> None:
        """Send one message, now or when the socket takes it."""
        self._unsent.append(frames)
        self.flush()

    def flush(self) -> None:
        """Send what is kept, as far as the socket takes it."""
        socket = self.socket
        if socket is None or not self._unsent:
            return
        while self._unsent:
            try:
                socket.send_multipart(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                self._poller.register(socket, zmq.POLLIN | zmq.POLLOUT)
                return
            self._unsent.popleft()
        self._poller.register(socket, zmq.POLLIN)

    @property
    def stuck(self) -> bool:
        """Whether messages wait for the socket."""
        return bool(self._unsent)

    def close(self, *, linger_ms: int) -> None:
        """Close for good; waits up to `linger_ms` for the peer to take what was sent."""
        self.flush()
        self._drop(linger_ms=linger_ms)
        self._context.term()

    def _drop(self, *, linger_ms: int) -> None:
        if self.socket is not None:
            self._poller.unregister(self.socket)
            if self._monitor is not None:
                self._poller.unregister(self._monitor)
                self.socket.disable_monitor()
                self._monitor.close(0)
                self._monitor = None
            self.socket.close(linger=linger_ms)
            self.socket = None
