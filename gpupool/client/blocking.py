"""The blocking client. Each thread that uses it gets a connection of its own, so threads share nothing and wait for nobody."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import zmq

from gpupool.client.budget import Budgets
from gpupool.client.call import Call, InferOptions, check_hedge_after, filled
from gpupool.client.calls import DEFAULT_RETRIES, DEFAULT_TIMEOUT_S
from gpupool.client.chunks import Chunks
from gpupool.client.connect import Key, curve_keys, when_forgotten
from gpupool.client.connection import SLICE_S, Connection
from gpupool.client.reply import Reply
from gpupool.errors import Cancelled, GpuPoolError


class Client:
    """A pool's client that blocks.

    Args:
        endpoint: where the router listens, such as "tcp://127.0.0.1:5555".
        timeout: seconds that a request may take in all, retries included, unless it brings its own.
        retries: how often to try again what the pool answered with a retryable error, as long as not more than about a fifth of
            the client's requests are retried; 0 turns it off.
        hedge_after: seconds without a reply after which a request is sent a second time, for 5 % of the requests at most; the first
            good answer counts. None: never. A time that 95 % of the replies keep is a good one.
        server_key: the pool's public CURVE key, as 40 characters or as the path of its file; turns encryption on.
        secret_key: this client's own CURVE key, likewise; a pool with CURVE lets in only the keys that it knows.

    Safe to use from several threads; close it when none is waiting in it (those that are get `Cancelled`).
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
        self._budgets = Budgets()
        self._curve = curve_keys(server_key, secret_key)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._closed = threading.Event()
        self._pid = os.getpid()
        self._forgotten = when_forgotten(self, self._context, self._connections)
        try:
            self._connection()  # a wrong endpoint or key fails here, not at the first request
        except ValueError:
            self._context.term()
            raise

    def infer(
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
        """Run one sample, or with `many` a list of samples whose results come back as a list.

        Args:
            sample: what the model asks for; arrays of numpy and torch may stand anywhere in it.
            model: default: the pool's first.
            version: default: the model's current one.
            timeout: seconds; default: the client's.
            priority: 0 to 9, 9 most urgent; the pool's default is 5.
            many: the sample is a list of samples.
            key: for models that keep the last good reply per key.
            retry: False: never run it twice, not even when a worker or the connection is lost.
            hedge_after: seconds; default: the client's. `math.inf`: not this one.
            trace: W3C traceparent; default: that of the current OpenTelemetry span, if this process has one. "": none.

        Raises:
            GpuPoolError: the class of the reply's code; DeadlineExceeded also when nobody answers at all.
        """
        options: InferOptions = {
            "model": model, "version": version, "timeout": timeout, "priority": priority, "key": key, "retry": retry,
            "hedge_after": hedge_after, "trace": trace,
        }  # fmt: skip
        connection = self._connection()
        with connection.held():
            call = connection.calls.infer(sample, time.monotonic(), many=many, **self._filled(options))
            return connection.wait(call)

    @overload
    def map(
        self,
        samples: Iterable[object],
        *,
        concurrency: int = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[InferOptions],
    ) -> Iterator[Reply]: ...
    @overload
    def map(
        self, samples: Iterable[object], *, concurrency: int = ..., return_exceptions: bool, **options: Unpack[InferOptions]
    ) -> Iterator[Reply | GpuPoolError]: ...
    def map(
        self,
        samples: Iterable[object],
        *,
        concurrency: int = 64,
        return_exceptions: bool = False,
        **options: Unpack[InferOptions],
    ) -> Iterator[Reply | GpuPoolError]:
        """Run many samples as requests of their own, at most `concurrency` at a time; replies in the samples' order.

        Samples are taken as they are needed, so they may be a generator without end. Consume it in one thread. An error is raised
        in its place and ends the iteration, or is yielded with `return_exceptions`. Options as for `infer`.
        """
        return self._replies(samples, concurrency, self._filled(options), return_exceptions=return_exceptions)

    def stream(
        self,
        samples: Iterable[object],
        *,
        chunk: int = 32,
        concurrency: int = 4,
        return_exceptions: bool = False,
        **options: Unpack[InferOptions],
    ) -> Iterator[Any]:
        """Run many small samples in requests of `chunk` of them, at most `concurrency` requests at a time; results in order.

        Yields the results themselves, one for each sample, a chunk's as soon as it and those before it are there. Cheaper than
        `map`, which makes a request of each sample; but a chunk's samples share its fate: an error of one is the error of all. It
        is raised in the place of the first, or yielded for each with `return_exceptions`. Otherwise as `map`; `timeout` is a
        chunk's.
        """
        chunks = Chunks(chunk)
        settings = {**self._filled(options), "many": True}
        replies = self._replies(chunks.cut(samples), concurrency, settings, return_exceptions=return_exceptions)
        with contextlib.closing(replies):
            for outcome in replies:
                yield from chunks.spread(outcome, return_exceptions=return_exceptions)

    def _replies(
        self, samples: Iterable[object], concurrency: int, settings: dict[str, Any], *, return_exceptions: bool
    ) -> Generator[Reply | GpuPoolError, None, None]:
        if concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1, got {concurrency}")
        connection = self._connection()
        window: deque[Call] = deque()

        def start(sample: object) -> Call:
            with connection.held():
                try:
                    call = connection.calls.infer(sample, time.monotonic(), **settings)
                except GpuPoolError as e:  # it cannot be sent: an error in its place, as any other
                    return Call.failed(e)
                connection.flush()
                return call

        def finish() -> Reply | GpuPoolError:
            with connection.held():
                try:
                    return connection.wait(window.popleft())
                except GpuPoolError as e:
                    if return_exceptions:
                        return e
                    raise

        try:
            for sample in samples:
                if len(window) >= concurrency:
                    yield finish()
                window.append(start(sample))
            while window:
                yield finish()
        finally:
            with contextlib.suppress(GpuPoolError, RuntimeError), connection.held():
                for call in window:
                    connection.abandon(call)

    def ping(self, *, timeout: float | None = None) -> float:
        """Ask the router whether it is there; returns the round trip in seconds."""
        started = time.monotonic()
        self._ask("ping", timeout)
        return time.monotonic() - started

    def info(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return what the pool tells about itself: versions, models, signatures and limits."""
        result: dict[str, Any] = self._ask("info", timeout).result
        return result

    def close(self) -> None:
        """Close every connection; waits about a quarter of a second at most. Closing twice does no harm."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        self._forgotten.detach()
        with self._lock:
            connections = self._connections.copy()
            self._connections.clear()
        # A connection in use closes itself: sockets belong to one thread at a time.
        closed = [c.close(timeout_s=2 * SLICE_S) for c in connections]
        if all(closed):
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, kind: str, timeout: float | None) -> Reply:
        connection = self._connection()
        with connection.held():
            call = connection.calls.add(
                {"type": kind},
                [],
                time.monotonic(),
                timeout=self.timeout if timeout is None else timeout,
                retries=self.retries,
            )
            return connection.wait(call)

    def _filled(self, options: InferOptions) -> dict[str, Any]:
        return filled(options, timeout=self.timeout, retries=self.retries, hedge_after=self.hedge_after)

    def _connection(self) -> Connection:
        if os.getpid() != self._pid:
            raise RuntimeError("this client was made before a fork; ZeroMQ does not survive one, make a client in the child")
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            if self._closed.is_set():
                raise Cancelled("the client is closed")
            connection = Connection(self._context, self.endpoint, self._curve, self._budgets, self._closed)
            self._local.connection = connection
            with self._lock:
                gone = [c for c in self._connections if not c.thread.is_alive()]
                self._connections[:] = [c for c in self._connections if c.thread.is_alive()]
                self._connections.append(connection)
            for c in gone:
                c.close(timeout_s=0)
        return connection
