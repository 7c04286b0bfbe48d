"""One thread's connection to the pool: turns the socket until a call has its outcome."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

import zmq

from gpupool.client.calls import Call, Calls, cancel_message
from gpupool.client.connect import CurveKeys, open_socket
from gpupool.client.reply import Reply
from gpupool.errors import Cancelled

#: Longest wait without a look around: bounds how late a thread notices that another one closed the client.
SLICE_S = 0.25


class Connection:
    """One thread's socket and calls."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: CurveKeys | None, closed: threading.Event
    ) -> None:
        self.thread = threading.current_thread()
        self.calls = Calls(endpoint)
        self._link = open_socket(context, endpoint, curve)
        self._closed = closed
        self._lock = threading.Lock()
        self._poller = zmq.Poller()
        self._events = zmq.POLLIN
        self._poller.register(self._link.socket, self._events)
        self._poller.register(self._link.monitor, zmq.POLLIN)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the socket; only its own thread may, because ZeroMQ sockets cannot be shared."""
        if threading.current_thread() is not self.thread:
            raise RuntimeError("a connection of this client was taken into another thread (an iterator of map?)")
        with self._lock:
            if self._closed.is_set():
                self._close()
                raise Cancelled("the client is closed")
            yield

    def wait(self, call: Call) -> Reply:
        """Run the connection until the call has an outcome."""
        try:
            self.flush()
            while call.outcome is None:
                self._turn(call)
        except BaseException:  # KeyboardInterrupt too: the pool shall not work for nobody
            self.abandon(call)
            raise
        return call.result()

    def flush(self) -> None:
        """Send what can be sent now."""
        self._look_for_loss()
        now = time.monotonic()
        while (call := self.calls.next_unsent()) is not None and self._link.send(self.calls.message(call, now)):
            self.calls.mark_sent(call)

    def abandon(self, call: Call) -> None:
        """Drop a call, and tell the pool."""
        message = self.calls.abandon(call)
        if message is not None and not self._look_for_loss():
            self._link.send([message])

    def _look_for_loss(self) -> bool:
        """Whether the connection was lost since the last look: told once, so whoever hears it says it to the calls."""
        lost = self._link.lost()
        if lost:
            self.calls.disconnected()
        return lost

    def close(self, *, timeout_s: float) -> bool:
        """Close the socket unless its thread is using it for longer than that; False then."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._close()
        finally:
            self._lock.release()
        return True

    def _turn(self, call: Call) -> None:
        events = zmq.POLLIN if self.calls.next_unsent() is None or not self._link.up else zmq.POLLIN | zmq.POLLOUT
        if events != self._events:
            self._events = events
            self._poller.modify(self._link.socket, events)
        wait = min(self.calls.due() - time.monotonic(), SLICE_S)
        self._poller.poll(math.ceil(max(0, wait) * 1000))
        while (message := self._link.receive()) is not None:
            self.calls.receive(message, time.monotonic())
            if call.outcome is not None:
                return
        for late in self.calls.expire(time.monotonic()):
            if late.sent and not self._look_for_loss():
                self._link.send([cancel_message(late)])
        if self._closed.is_set():
            raise Cancelled("the client was closed")
        self.flush()

    def _close(self) -> None:
        if not self._link.socket.closed:
            self._link.close()
