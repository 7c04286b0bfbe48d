"""The asyncio client, on plain asyncio and on uvloop.

It watches the socket's descriptor itself. That descriptor is edge-triggered: it reports a change once, and a send or a receive may
eat the report. So every turn of the connection runs until nothing more can be read or sent, one follows every send, and while
calls are open a timer turns it twice a second in any case.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack, overload

import zmq

from gpupool.client.calls import DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, Call, Calls, InferOptions, cancel_message
from gpupool.client.connect import Key, Link, curve_keys, open_socket
from gpupool.client.reply import Reply
from gpupool.errors import Cancelled, GpuPoolError

_TURN_EVERY_S: Final = 0.5
#: Messages read before other tasks get their turn.
_BURST: Final = 256


class AsyncClient:
    """A pool's client for asyncio; the same as `Client`, with `await`.

    It belongs to the event loop in which it is first used. Cancelling a task that waits in it cancels the request in the pool.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        server_key: Key | None = None,
        secret_key: Key | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.retries = retries
        self._curve = curve_keys(server_key, secret_key)
        self._calls = Calls(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._link: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False  # a turn is already on the loop's list
        self._closed = False

    async def infer(
        self,
        sample: object,
        *,
        model: str | None = None,
        version: str | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        many: bool = False,
        key: str | None = None,
        retry: bool = True,
        trace: str | None = None,
    ) -> Reply:
        """Run one sample, or with `many` a list of them; arguments and errors as for `Client.infer`."""
        self._connect()
        call = self._calls.infer(
            sample,
            time.monotonic(),
            timeout=self.timeout if timeout is None else timeout,
            retries=self.retries,
            retry=retry,
            many=many,
            model=model,
            version=version,
            priority=priority,
            key=key,
            trace=trace,
        )
        return await self._finish(self._start(call))

    @overload
    def map(
        self,
        samples: Iterable[object] | AsyncIterable[object],
        *,
        concurrency: int = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[Reply]: ...
    @overload
    def map(
        self,
        samples: Iterable[object] | AsyncIterable[object],
        *,
        concurrency: int = ...,
        return_exceptions: bool,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[Reply | GpuPoolError]: ...
    async def map(
        self,
        samples: Iterable[object] | AsyncIterable[object],
        *,
        concurrency: int = 64,
        return_exceptions: bool = False,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[Reply | GpuPoolError]:
        """Run many samples as requests of their own, at most `concurrency` at a time; replies in order, as `Client.map`."""
        if concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1, got {concurrency}")
        self._connect()
        window: deque[Call] = deque()
        settings: dict[str, Any] = dict(options)
        if settings.get("timeout") is None:
            settings["timeout"] = self.timeout

        async def finish() -> Reply | GpuPoolError:
            try:
                return await self._finish(window.popleft())
            except GpuPoolError as e:
                if return_exceptions:
                    return e
                raise

        try:
            async for sample in _each(samples):
                if len(window) >= concurrency:
                    yield await finish()
                self._connect()
                window.append(self._start(self._calls.infer(sample, time.monotonic(), retries=self.retries, **settings)))
            while window:
                yield await finish()
        finally:
            for call in window:
                self._abandon(call)

    async def ping(self, *, timeout: float | None = None) -> float:
        """Ask the router whether it is there; returns the round trip in seconds."""
        started = time.monotonic()
        await self._ask("ping", timeout)
        return time.monotonic() - started

    async def info(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return what the pool tells about itself: versions, models, signatures and limits."""
        result: dict[str, Any] = (await self._ask("info", timeout)).result
        return result

    async def close(self) -> None:
        """Close the connection; whoever still waits in it gets `Cancelled`. Closing twice does no harm."""
        if self._closed:
            return
        self._closed = True
        link, context, loop = self._link, self._context, self._loop
        if link is None or context is None or loop is None:
            return
        for call in list(self._calls.open.values()):
            self._abandon(call)
        for fd in link.fds:
            loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        link.close()
        self._link = None
        await asyncio.to_thread(context.term)  # up to the linger time, for the cancel messages

    async def __aenter__(self) -> Self:
        self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, kind: str, timeout: float | None) -> Reply:
        self._connect()
        seconds = self.timeout if timeout is None else timeout
        call = self._calls.add({"type": kind}, [], time.monotonic(), timeout=seconds, retries=self.retries)
        return await self._finish(self._start(call))

    def _connect(self) -> None:
        if self._closed:
            raise Cancelled("the client is closed")
        loop = asyncio.get_running_loop()
        if self._link is None:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            try:
                self._link = open_socket(context, self.endpoint, self._curve)
            except ValueError:
                context.term()
                raise
            self._context, self._loop = context, loop
            for fd in self._link.fds:
                loop.add_reader(fd, self._turn)
        elif self._loop is not loop:
            raise RuntimeError("this client belongs to another event loop")

    def _start(self, call: Call) -> Call:
        assert self._loop is not None
        call.future = self._loop.create_future()
        self._flush()
        self._set_timer()
        self._turn_soon()
        return call

    async def _finish(self, call: Call) -> Reply:
        """Wait until the call has an outcome; the future only wakes, so that an outcome nobody fetches makes no noise."""
        try:
            await call.future
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        return call.result()

    def _abandon(self, call: Call) -> None:
        message = self._calls.abandon(call)
        if message is not None and self._link is not None and not self._look_for_loss(self._link):
            self._link.send([message])
            self._turn_soon()
        _wake(call)

    def _turn_soon(self) -> None:
        if not self._soon and self._loop is not None:
            self._soon = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Do all that can be done now."""
        self._soon = False
        link = self._link
        if link is None:
            return
        for _ in range(_BURST):
            message = link.receive()
            if message is None:
                break
            ended = self._calls.receive(message, time.monotonic())
            if ended is not None:
                _wake(ended)
        else:
            self._turn_soon()
        for late in self._calls.expire(time.monotonic()):
            if late.sent and not self._look_for_loss(link):
                link.send([cancel_message(late)])
            _wake(late)
        self._flush()
        if link.ready(to_send=self._calls.next_unsent() is not None):  # what came meanwhile may have lost its report
            self._turn_soon()
        self._set_timer()

    def _flush(self) -> None:
        link = self._link
        if link is None:
            return
        self._look_for_loss(link)
        now = time.monotonic()
        while (call := self._calls.next_unsent()) is not None and link.send(self._calls.message(call, now)):
            self._calls.mark_sent(call)

    def _look_for_loss(self, link: Link) -> bool:
        if not link.lost():
            return False
        for call in self._calls.disconnected():
            _wake(call)
        return True

    def _set_timer(self) -> None:
        """Have a turn when something is due, and none while nothing is open."""
        if self._loop is None or not self._calls.open:
            return
        now = self._loop.time()
        due = now + min(max(0.0, self._calls.due() - time.monotonic()), _TURN_EVERY_S)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._turn()


def _wake(call: Call) -> None:
    if call.future is not None and not call.future.done():
        call.future.set_result(None)


async def _each(samples: Iterable[object] | AsyncIterable[object]) -> AsyncIterator[object]:
    if isinstance(samples, AsyncIterable):
        async for sample in samples:
            yield sample
    else:
        for sample in samples:
            yield sample
