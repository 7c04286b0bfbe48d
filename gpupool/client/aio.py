"""The asyncio client, on plain asyncio and on uvloop.

It watches the socket's descriptor itself. That descriptor is edge-triggered: it reports a change once, and a send or a receive may
eat the report. So every turn of the connection runs until nothing more can be read or sent, one follows every send, and while
calls are open a timer turns it twice a second in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack, overload

import zmq

from gpupool.client.budget import Budgets
from gpupool.client.call import Call, InferOptions, check_hedge_after, filled
from gpupool.client.calls import DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, Calls
from gpupool.client.chunks import Chunks
from gpupool.client.connect import Key, Link, curve_keys, open_socket, when_forgotten
from gpupool.client.reply import Reply
from gpupool.errors import Cancelled, GpuPoolError

_TURN_EVERY_S: Final = 0.5
_END: Final = object()
_NOT_YET: Final = object()
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
        hedge_after: float | None = None,
        server_key: Key | None = None,
        secret_key: Key | None = None,
    ) -> None:
        check_hedge_after(hedge_after)
        self.endpoint = endpoint
        self.timeout = timeout
        self.retries = retries
        self.hedge_after = hedge_after
        self._curve = curve_keys(server_key, secret_key)
        self._calls = Calls(endpoint, budgets=Budgets())
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
        hedge_after: float | None = None,
        trace: str | None = None,
    ) -> Reply:
        """Run one sample, or with `many` a list of them; arguments and errors as for `Client.infer`."""
        options: InferOptions = {
            "model": model, "version": version, "timeout": timeout, "priority": priority, "key": key, "retry": retry,
            "hedge_after": hedge_after, "trace": trace,
        }  # fmt: skip
        self._connect()
        call = self._calls.infer(sample, time.monotonic(), many=many, **self._filled(options))
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
    def map(
        self,
        samples: Iterable[object] | AsyncIterable[object],
        *,
        concurrency: int = 64,
        return_exceptions: bool = False,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[Reply | GpuPoolError]:
        """Run many samples as requests of their own, at most `concurrency` at a time; replies in order, as `Client.map`."""
        return self._replies(samples, concurrency, self._filled(options), return_exceptions=return_exceptions)

    async def stream(
        self,
        samples: Iterable[object] | AsyncIterable[object],
        *,
        chunk: int = 32,
        concurrency: int = 4,
        return_exceptions: bool = False,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[Any]:
        """Run many small samples in requests of `chunk` of them; results in order, as `Client.stream`.

        A chunk of an async iterable waits until it is full.
        """
        chunks = Chunks(chunk)
        cut = chunks.cut_async(samples) if isinstance(samples, AsyncIterable) else chunks.cut(samples)
        settings = {**self._filled(options), "many": True}
        async with contextlib.aclosing(
            self._replies(cut, concurrency, settings, return_exceptions=return_exceptions)
        ) as replies:
            async for outcome in replies:
                for result in chunks.spread(outcome, return_exceptions=return_exceptions):
                    yield result

    async def _replies(
        self,
        samples: Iterable[object] | AsyncIterable[object],
        concurrency: int,
        settings: dict[str, Any],
        *,
        return_exceptions: bool,
    ) -> AsyncGenerator[Reply | GpuPoolError, None]:
        if concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1, got {concurrency}")
        self._connect()
        window: deque[Call] = deque()
        source = _Source(samples)

        async def finish() -> Reply | GpuPoolError:
            try:
                return await self._finish(window.popleft())
            except GpuPoolError as e:
                if return_exceptions:
                    return e
                raise

        try:
            while True:
                while window and (len(window) >= concurrency or window[0].outcome is not None):
                    yield await finish()
                sample = await source.next(window[0].future if window else None)
                if sample is _NOT_YET:
                    continue
                if sample is _END:
                    break
                self._connect()
                try:
                    window.append(self._start(self._calls.infer(sample, time.monotonic(), **settings)))
                except GpuPoolError as e:  # it cannot be sent: an error in its place, as any other
                    window.append(Call.failed(e))
            while window:
                yield await finish()
        finally:
            for call in window:
                self._abandon(call)
            await source.close()

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
        for call in self._calls.abandon_all():
            _wake(call)
        self._flush()
        for fd in link.fds:
            loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        self._forgotten.detach()
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

    def _filled(self, options: InferOptions) -> dict[str, Any]:
        return filled(options, timeout=self.timeout, retries=self.retries, hedge_after=self.hedge_after)

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
            self._forgotten = when_forgotten(self, context, [self._link])
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
            if call.outcome is None:
                await call.future
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        return call.result()

    def _abandon(self, call: Call) -> None:
        self._calls.abandon(call)
        self._flush()
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
            _wake(late)
        self._flush()
        if link.ready(to_send=self._calls.wants_to_send()):  # what came meanwhile may have lost its report
            self._turn_soon()
        self._set_timer()

    def _flush(self) -> None:
        link = self._link
        if link is None:
            return
        self._look_for_loss(link)
        now = time.monotonic()
        while (message := self._calls.next_message(now)) is not None and link.send(message):
            self._calls.mark_sent(now)
            self._look_for_loss(link)

    def _look_for_loss(self, link: Link) -> None:
        if link.lost():
            for call in self._calls.disconnected():
                _wake(call)
        self._calls.refused = link.refused

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


class _Source:
    """The samples of a `map`, one at a time; an async iterable is asked in a task, so that replies need not wait for it."""

    def __init__(self, samples: Iterable[object] | AsyncIterable[object]) -> None:
        self._async = aiter(samples) if isinstance(samples, AsyncIterable) else None
        self._plain = iter(()) if isinstance(samples, AsyncIterable) else iter(samples)
        self._task: asyncio.Future[object] | None = None

    async def next(self, beside: asyncio.Future[None] | None) -> object:
        """Return the next sample, or _END; or _NOT_YET where what is awaited beside it came first."""
        if self._async is None:
            return next(self._plain, _END)
        if self._task is None:
            self._task = asyncio.ensure_future(anext(self._async, _END))
        waiting: set[asyncio.Future[Any]] = {self._task} if beside is None else {self._task, beside}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not self._task.done():
            return _NOT_YET
        task, self._task = self._task, None
        return task.result()

    async def close(self) -> None:
        """Ask for no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
