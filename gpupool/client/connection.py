"""One thread's connection to the pool: turns the socket until a call has its outcome."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

import zmq

from gpupool.client.budget import Budgets
from gpupool.client.call import Call
from gpupool.client.calls import Calls
from gpupool.client.connect import CurveKeys, open_socket
from gpupool.client.reply import Reply
from gpupool.errors import Cancelled

#: Longest wait without a look around: bounds how late a thread notices that another one closed the client.
SLICE_S = 0.25


class Connection:
    """One thread's socket and calls."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        curve: CurveKeys | None,
        budgets: Budgets,
        closed: threading.Event,
    ) -> None:
        self.thread = threading.current_thread()
        self.calls = Calls(endpoint, budgets=budgets)
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
        while (message := self.calls.next_message(now)) is not None and self._link.send(message):
            self.calls.mark_sent(now)
            self._look_for_loss()

    def abandon(self, call: Call) -> None:
        """Drop a call, and tell the pool."""
        self.calls.abandon(call)
        self.flush()

    def _look_for_loss(self) -> None:
        if self._link.lost():
            self.calls.disconnected()
        self.calls.refused = self._link.refused

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
        events = zmq.POLLIN | zmq.POLLOUT if self._link.up and self.calls.wants_to_send() else zmq.POLLIN
        if events != self._events:
            self._events = events
            self._poller.modify(self._link.socket, events)
        wait = min(self.calls.due() - time.monotonic(), SLICE_S)
        self._poller.poll(math.ceil(max(0, wait) * 1000))
        while (message := self._link.receive()) is not None:
            self.calls.receive(message, time.monotonic())
            if call.outcome is not None:
                if self.calls.wants_to_send():  # a hedged call leaves one to cancel
                    self.flush()
                return
        self.calls.expire(time.monotonic())
        if self._closed.is_set():
            raise Cancelled("the client was closed")
        self.flush()

    def drop(self) -> None:
        """Close the socket without a word to anybody; only when no thread can be using it any more."""
        self._link.drop()

    def _close(self) -> None:
        if not self._link.socket.closed:
            self.calls.abandon_all()
            self.flush()
            self._link.close()
