"""Both clients against a router of a few lines: the wire, time limits, cancelling, threads, and a router that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import uvloop
import zmq

from gpupool.client import AsyncClient, Cancelled, Client, DeadlineExceeded, GpuPoolError, InvalidInput, Overloaded, WorkerLost
from gpupool.client.connect import curve_keys
from gpupool.keys import certificate

Handle = Callable[[dict[str, Any], list[bytes]], "list[list[bytes]]"]


def ok(header: dict[str, Any], *frames: bytes, **fields: object) -> list[bytes]:
    return [msgpack.packb({"v": 1, "id": header["id"], "code": "ok", "retryable": False, **fields}), *frames]


def failed(header: dict[str, Any], code: str, *, retryable: bool = False, **fields: object) -> list[bytes]:
    return [msgpack.packb({"v": 1, "id": header["id"], "code": code, "retryable": retryable, **fields}), b""]


def echo(header: dict[str, Any], frames: list[bytes]) -> list[list[bytes]]:
    if header.get("type") == "info":
        return [ok(header, msgpack.packb({"pool": "fake"}))]
    return [] if header.get("type") == "cancel" else [ok(header, *frames, model="m", worker=0)]


def silence(header: dict[str, Any], frames: list[bytes]) -> list[list[bytes]]:
    return []


class FakeRouter:
    """A ROUTER socket in a thread; `handle` says what each request is answered, `seen` keeps the headers."""

    def __init__(self, handle: Handle = echo, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self.handle = handle
        self.seen: list[dict[str, Any]] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(endpoint)
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.halt = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            while not self.halt.is_set():
                if self.socket.poll(20):
                    peer, head, *frames = self.socket.recv_multipart()
                    header = msgpack.unpackb(head)
                    self.seen.append(header)
                    for reply in self.handle(header, frames):
                        self.socket.send_multipart([peer, *reply])
        finally:
            self.socket.close(0)

    def wait_for(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        end = time.monotonic() + 10
        while len(found := [h for h in list(self.seen) if h.get("type", "infer") == kind]) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} {kind}"
            time.sleep(0.005)
        return found

    def close(self) -> None:
        self.halt.set()
        self.thread.join(10)
        self.context.term()


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter()
    yield fake
    fake.close()


@pytest.fixture
def client(router: FakeRouter) -> Iterator[Client]:
    with Client(router.endpoint, timeout=10.0) as client:
        yield client


Runner = Callable[[Callable[[], Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run_async(request: pytest.FixtureRequest) -> Runner:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(main: Callable[[], Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(main(), 30))

    return run


def test_sample_goes_out_and_its_reply_comes_back(client: Client) -> None:
    reply = client.infer({"text": "hello", "x": np.arange(20000.0)}, model="m", priority=3)
    assert reply.result["text"] == "hello"
    assert np.array_equal(reply.result["x"], np.arange(20000.0))
    assert (reply.model, reply.worker, reply.code) == ("m", 0, "ok")
    assert client.infer([1, 2], many=True).result == [1, 2]


def test_ping_and_info(client: Client) -> None:
    assert 0 < client.ping() < 10
    assert client.info() == {"pool": "fake"}


def test_error_reply_is_raised(router: FakeRouter, client: Client) -> None:
    router.handle = lambda header, _: [failed(header, "invalid_input", message="no", field="text")]
    with pytest.raises(InvalidInput) as caught:
        client.infer({})
    assert (caught.value.field, caught.value.retryable, caught.value.code) == ("text", False, "invalid_input")


def test_silent_pool_ends_in_deadline_exceeded_and_the_work_is_cancelled(router: FakeRouter, client: Client) -> None:
    router.handle = silence
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.infer(1, timeout=0.2)
    assert 0.19 < time.monotonic() - started < 2
    assert router.wait_for("cancel")[0]["id"] == router.seen[0]["id"]


def test_absent_pool_ends_in_deadline_exceeded_and_closing_does_not_hang() -> None:
    started = time.monotonic()
    with Client("tcp://127.0.0.1:1") as client, pytest.raises(DeadlineExceeded, match="no connection"):
        client.infer(1, timeout=0.2)
    assert time.monotonic() - started < 2


def test_overloaded_is_tried_again(router: FakeRouter, client: Client) -> None:
    def busy_twice(header: dict[str, Any], frames: list[bytes]) -> list[list[bytes]]:
        return (
            echo(header, frames) if len(router.seen) > 2 else [failed(header, "overloaded", retryable=True, retry_after_ms=10)]
        )

    router.handle = busy_twice
    assert client.infer(7).result == 7
    assert len(router.seen) == 3


def test_no_retries_raises_at_once(router: FakeRouter) -> None:
    router.handle = lambda header, _: [failed(header, "overloaded", retryable=True, retry_after_ms=10)]
    with Client(router.endpoint, retries=0) as client, pytest.raises(Overloaded):
        client.infer(7)
    assert len(router.seen) == 1


def test_open_request_is_sent_again_under_its_id_when_the_router_is_back() -> None:
    first = FakeRouter(silence)
    with Client(first.endpoint) as client:
        replies: list[Any] = []
        thread = threading.Thread(target=lambda: replies.append(client.infer("x", timeout=20.0)))
        thread.start()
        lost_id = first.wait_for("infer")[0]["id"]
        first.close()
        second = FakeRouter(echo, first.endpoint)
        thread.join(20)
        assert replies[0].result == "x"
        assert [h["id"] for h in second.seen] == [lost_id]
        second.close()


def test_request_made_while_the_router_is_away_arrives_once_it_is_back() -> None:
    first = FakeRouter(echo)
    with Client(first.endpoint) as client:
        assert client.infer(1).result == 1
        first.close()
        second: list[FakeRouter] = []
        timer = threading.Timer(0.3, lambda: second.append(FakeRouter(echo, first.endpoint)))
        timer.start()
        assert client.infer(2, timeout=20.0).result == 2
        timer.join()
        assert len(second[0].seen) == 1
        second[0].close()


def test_request_that_must_not_run_twice_is_not_sent_again() -> None:
    first = FakeRouter(silence)
    with Client(first.endpoint) as client:
        threading.Timer(0.2, first.close).start()
        with pytest.raises(WorkerLost, match="must not run twice"):
            client.infer("x", timeout=20.0, retry=False)


def test_foreign_and_duplicate_messages_do_no_harm(router: FakeRouter, client: Client) -> None:
    junk = [[b""], [b"\xc1"], [b"GET / HTTP/1.1"], [msgpack.packb({"v": 1, "id": "other", "code": "ok"}), b"\xc0"]]
    router.handle = lambda header, frames: [*junk, *echo(header, frames), *echo(header, frames)]
    assert [client.infer(n).result for n in range(20)] == list(range(20))


def test_map_keeps_order_and_the_bound(router: FakeRouter, client: Client) -> None:
    held: list[list[bytes]] = []
    most = 0

    def backwards(header: dict[str, Any], frames: list[bytes]) -> list[list[bytes]]:
        nonlocal most
        held.append(ok(header, *frames))
        most = max(most, len(held))
        if len(held) < 8:
            return []
        out = held[::-1]
        held.clear()
        return out

    router.handle = backwards
    assert [r.result for r in client.map(range(64), concurrency=8)] == list(range(64))
    assert most == 8


def test_map_takes_samples_only_as_needed_and_cancels_when_dropped(router: FakeRouter, client: Client) -> None:
    def endless() -> Iterator[int]:
        n = 0
        while True:
            yield n
            n += 1

    replies = client.map(endless(), concurrency=4)
    assert next(replies).result == 0
    router.handle = silence
    router.seen.clear()
    replies.close()  # type: ignore[attr-defined]
    assert len(router.seen) < 10


def test_map_raises_an_error_in_its_place_or_hands_it_out(router: FakeRouter, client: Client) -> None:
    def odd(header: dict[str, Any], frames: list[bytes]) -> list[list[bytes]]:
        bad = frames and msgpack.unpackb(frames[0]) == 3
        return [failed(header, "model_error")] if bad else echo(header, frames)

    router.handle = odd
    got: list[object] = []
    with pytest.raises(GpuPoolError):
        got.extend(r.result for r in client.map(range(6), concurrency=2))
    assert got == [0, 1, 2]
    mixed = list(client.map(range(6), concurrency=2, return_exceptions=True))
    assert [r.code for r in mixed] == ["ok", "ok", "ok", "model_error", "ok", "ok"]


def test_threads_get_their_own_replies(client: Client) -> None:
    wrong: list[tuple[object, object]] = []

    def work(name: int) -> None:
        for n in range(100):
            if (got := client.infer([name, n]).result) != [name, n]:
                wrong.append((got, n))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not any(t.is_alive() for t in threads)
    assert wrong == []


def test_closing_wakes_a_thread_that_waits(router: FakeRouter) -> None:
    router.handle = silence
    client = Client(router.endpoint)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.infer(1, timeout=60.0)
        except GpuPoolError as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    router.wait_for("infer")
    started = time.monotonic()
    client.close()
    thread.join(5)
    assert time.monotonic() - started < 3
    assert isinstance(errors[0], Cancelled)
    with pytest.raises(Cancelled):
        client.infer(1)
    client.close()


def test_iterator_of_map_may_not_change_threads(client: Client) -> None:
    replies = client.map(range(10), concurrency=2)
    next(replies)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            next(replies)
        except RuntimeError as e:
            errors.append(e)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(10)
    assert "another thread" in str(errors[0])


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:5", "tcp://127.0.0.1:notaport", "ftp://x:1"])
def test_wrong_endpoint_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(ValueError, match="cannot connect"):
        Client(endpoint)


def test_wrong_key_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="40 characters"):
        Client("tcp://127.0.0.1:1", server_key="short")


def test_curve_encrypts_and_a_wrong_server_key_gets_nothing() -> None:
    public, secret = zmq.curve_keypair()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.curve_secretkey, server.curve_server, server.linger = secret, True, 0
    port = server.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        peer, head, *frames = server.recv_multipart()
        server.send_multipart([peer, *ok(msgpack.unpackb(head), *frames)])

    thread = threading.Thread(target=serve)
    thread.start()
    stranger = zmq.curve_keypair()[0].decode()
    with Client(f"tcp://127.0.0.1:{port}", server_key=stranger) as client, pytest.raises(DeadlineExceeded):
        client.infer(0, timeout=0.3)
    with Client(f"tcp://127.0.0.1:{port}", server_key=public.decode()) as client:
        assert client.infer(5).result == 5
    thread.join(5)
    server.close(0)
    context.term()


@pytest.mark.parametrize("given", ["text", "certificate", "bare"])
def test_keys_may_be_given_as_text_or_as_files(given: str, tmp_path: Path) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys: tuple[str | Path, str | Path] = public, secret
    if given != "text":
        keys = tmp_path / "a.key", tmp_path / "a.key_secret"
        keys[0].write_text(certificate(public) if given == "certificate" else public)
        keys[1].write_text(certificate(public, secret) if given == "certificate" else secret)
        with pytest.raises(ValueError, match="chmod 600"):
            curve_keys(*keys)
        keys[1].chmod(0o600)

    read = curve_keys(*keys)
    assert read is not None
    assert (read.server_key, read.secret_key) == (public, secret)
    assert secret not in repr(read)


def test_secret_key_alone_or_with_a_slip_is_refused_and_not_shown() -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with pytest.raises(ValueError, match="server_key"):
        Client("tcp://127.0.0.1:1", secret_key=secret)
    for slip in (secret[:-1], "~" + secret[1:]):
        with pytest.raises(ValueError, match="40 characters") as caught:
            Client("tcp://127.0.0.1:1", server_key=public, secret_key=slip)
        assert slip not in str(caught.value)


def test_whoever_hangs_up_at_once_is_tried_again_ever_more_rarely() -> None:
    """A proxy without anything behind it, say: libzmq's waits between tries must not be cut short by ours."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        done, count = threading.Event(), 0

        def hang_up() -> None:
            nonlocal count
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()
                    count += 1

        thread = threading.Thread(target=hang_up)
        thread.start()
        host, port = server.getsockname()
        with Client(f"tcp://{host}:{port}", timeout=2.0) as client, pytest.raises(DeadlineExceeded, match="no connection"):
            client.infer(1)
        done.set()
        thread.join(10)
    assert 1 <= count < 50


FORGOTTEN = """
import asyncio, gc
from gpupool.client import AsyncClient, Client, GpuPoolError

def blocking():
    try:
        Client({endpoint!r}, timeout=0.2).infer(1)
    except GpuPoolError as e:
        print(e.code)

async def awaiting():
    try:
        await AsyncClient({endpoint!r}, timeout=0.2).infer(1)
    except GpuPoolError as e:
        print(e.code)

{run}
gc.collect()
print("collected")
"""


@pytest.mark.parametrize("run", ["blocking()", "asyncio.run(awaiting())"])
def test_client_that_is_forgotten_with_a_request_unsent_does_not_hold_up_its_collection(run: str) -> None:
    code = FORGOTTEN.format(endpoint="tcp://127.0.0.1:1", run=run)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["deadline_exceeded", "collected"]


def test_interpreter_that_never_closes_its_client_still_ends(router: FakeRouter) -> None:
    code = "import sys; from gpupool.client import Client; c = Client(sys.argv[1]); print(c.infer(3).result)"
    out = subprocess.run([sys.executable, "-c", code, router.endpoint], capture_output=True, text=True, timeout=30, check=True)
    assert out.stdout.strip() == "3"


def test_import_needs_neither_torch_nor_numpy_nor_pydantic() -> None:
    code = "import sys, gpupool.client; print(sorted({'torch', 'numpy', 'pydantic', 'structlog', 'uvloop'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_async_requests_run_side_by_side(router: FakeRouter, run_async: Runner) -> None:
    async def main() -> None:
        async with AsyncClient(router.endpoint) as client:
            replies = await asyncio.gather(*(client.infer(n) for n in range(500)))
            assert [r.result for r in replies] == list(range(500))
            assert await client.ping() > 0
            assert await client.info() == {"pool": "fake"}

    run_async(main)


def test_async_task_cancelled_cancels_in_the_pool(router: FakeRouter, run_async: Runner) -> None:
    async def main() -> None:
        async with AsyncClient(router.endpoint) as client:
            router.handle = silence
            task = asyncio.create_task(client.infer("slow"))
            await asyncio.to_thread(router.wait_for, "infer")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cancel = (await asyncio.to_thread(router.wait_for, "cancel"))[0]
            assert cancel["id"] == router.seen[0]["id"]
            router.handle = echo
            assert (await client.infer(2)).result == 2

    run_async(main)


def test_async_deadline_holds_without_any_reply(router: FakeRouter, run_async: Runner) -> None:
    async def main() -> None:
        async with AsyncClient(router.endpoint) as client:
            router.handle = silence
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await client.infer(1, timeout=0.2)
            assert time.monotonic() - started < 2
            await asyncio.to_thread(router.wait_for, "cancel")

    run_async(main)


def test_async_router_restart_is_bridged(run_async: Runner) -> None:
    async def main() -> None:
        first = FakeRouter(silence)
        async with AsyncClient(first.endpoint) as client:
            tasks = [asyncio.create_task(client.infer(n, timeout=20.0)) for n in range(50)]
            await asyncio.to_thread(first.wait_for, "infer", 50)
            await asyncio.to_thread(first.close)
            second = FakeRouter(echo, first.endpoint)
            replies = await asyncio.gather(*tasks)
            assert [r.result for r in replies] == list(range(50))
            assert sorted(h["id"] for h in second.seen) == sorted(h["id"] for h in first.seen)
        await asyncio.to_thread(second.close)

    run_async(main)


def test_async_map_keeps_order_over_plain_and_async_iterables(router: FakeRouter, run_async: Runner) -> None:
    async def numbers() -> AsyncIterator[int]:
        for n in range(100):
            yield n

    async def main() -> None:
        async with AsyncClient(router.endpoint) as client:
            assert [r.result async for r in client.map(range(100), concurrency=7)] == list(range(100))
            assert [r.result async for r in client.map(numbers(), concurrency=7)] == list(range(100))
            router.handle = silence
            async with contextlib.aclosing(client.map(range(9), concurrency=3, timeout=9)) as replies:  # type: ignore[type-var]
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(aiter(replies)), 0.1)
            await asyncio.to_thread(router.wait_for, "cancel", 3)

    run_async(main)


def test_async_close_wakes_those_who_wait_and_later_calls_are_refused(router: FakeRouter, run_async: Runner) -> None:
    async def main() -> None:
        router.handle = silence
        client = AsyncClient(router.endpoint)
        task = asyncio.create_task(client.infer(1))
        await asyncio.to_thread(router.wait_for, "infer")
        await client.close()
        with pytest.raises(Cancelled):
            await task
        with pytest.raises(Cancelled):
            await client.infer(1)
        await client.close()
        await asyncio.to_thread(router.wait_for, "cancel")

    run_async(main)


def test_async_client_belongs_to_one_loop(router: FakeRouter) -> None:
    client = AsyncClient(router.endpoint)

    async def use() -> object:
        return (await client.infer(1)).result

    with asyncio.Runner() as one:
        assert one.run(use()) == 1
        with asyncio.Runner() as other, pytest.raises(RuntimeError, match="another event loop"):
            other.run(use())
        one.run(client.close())


def hedges_only(header: dict[str, Any], frames: list[bytes]) -> list[list[bytes]]:
    return echo(header, frames) if header["id"].endswith("h") else []


def test_slow_request_is_sent_again_and_the_loser_is_cancelled(router: FakeRouter) -> None:
    router.handle = hedges_only
    with Client(router.endpoint, timeout=20.0, hedge_after=0.05) as client:
        assert client.infer(5).result == 5
        first, hedge = router.wait_for("infer", 2)
        assert hedge["id"] == f"{first['id']}h"
        assert router.wait_for("cancel")[0]["id"] == first["id"]
        assert [r.result for r in client.map(range(3), concurrency=3)] == [0, 1, 2]
        router.wait_for("cancel", 4)
        with pytest.raises(DeadlineExceeded):
            client.infer(1, timeout=0.3, hedge_after=float("inf"))
        with pytest.raises(DeadlineExceeded):
            client.infer(1, timeout=0.3, retry=False)
        assert sum(str(h["id"]).endswith("h") for h in router.wait_for("infer")) == 4


def test_async_slow_request_is_sent_again_and_the_loser_is_cancelled(router: FakeRouter, run_async: Runner) -> None:
    async def main() -> None:
        router.handle = hedges_only
        async with AsyncClient(router.endpoint, timeout=20.0) as client:
            assert (await client.infer(5, hedge_after=0.05)).result == 5
            cancel = (await asyncio.to_thread(router.wait_for, "cancel"))[0]
            assert cancel["id"] == router.seen[0]["id"]
            assert [r.result async for r in client.map(range(3), hedge_after=0.05)] == [0, 1, 2]

    run_async(main)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_time_to_hedge_after_is_checked_at_once(kind: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="hedge_after"):
        kind("tcp://127.0.0.1:1", hedge_after=0)


def no_threes(header: dict[str, Any], frames: list[bytes]) -> list[list[bytes]]:
    if header.get("many") and 3 in msgpack.unpackb(frames[0]):
        return [failed(header, "model_error", message="three")]
    return echo(header, frames)


def test_stream_cuts_into_chunks_and_yields_results_in_order(router: FakeRouter, client: Client) -> None:
    assert list(client.stream(iter(range(10)), chunk=4)) == list(range(10))
    assert len(router.wait_for("infer")) == 3
    assert all(h["many"] for h in router.seen)
    assert list(client.stream([])) == []
    for wrong in ({"chunk": 0}, {"chunk": 65537}, {"concurrency": 0}):
        with pytest.raises(ValueError, match="expected"):
            next(client.stream([1], **wrong))  # type: ignore[arg-type]


def test_stream_raises_an_error_in_its_place_or_hands_one_out_for_each_sample(router: FakeRouter, client: Client) -> None:
    router.handle = no_threes
    got: list[object] = []
    with pytest.raises(GpuPoolError, match="three"):
        got.extend(client.stream(range(8), chunk=2))
    assert got == [0, 1]
    mixed = list(client.stream(range(8), chunk=2, return_exceptions=True))
    assert [getattr(r, "code", r) for r in mixed] == [0, 1, "model_error", "model_error", 4, 5, 6, 7]


def test_stream_refuses_a_wrong_number_of_results(router: FakeRouter, client: Client) -> None:
    router.handle = lambda header, _: [ok(header, msgpack.packb([1]))]
    with pytest.raises(GpuPoolError, match="1 results to 2 samples"):
        list(client.stream([1, 2]))
    assert [e.code for e in client.stream([1, 2], return_exceptions=True)] == ["internal", "internal"]


def test_stream_takes_chunks_only_as_needed_and_cancels_when_dropped(router: FakeRouter, client: Client) -> None:
    router.handle = lambda header, frames: echo(header, frames) if len(router.seen) == 1 else []
    results = client.stream(itertools.count(), chunk=2, concurrency=3)
    assert [next(results), next(results)] == [0, 1]
    results.close()  # type: ignore[attr-defined]
    router.wait_for("cancel", 2)
    assert len(router.wait_for("infer")) == 3


def test_async_stream_over_plain_and_async_iterables(router: FakeRouter, run_async: Runner) -> None:
    async def numbers() -> AsyncIterator[int]:
        for n in range(10):
            yield n

    async def main() -> None:
        async with AsyncClient(router.endpoint) as client:
            assert [r async for r in client.stream(range(10), chunk=4)] == list(range(10))
            assert [r async for r in client.stream(numbers(), chunk=4)] == list(range(10))
            assert len(router.wait_for("infer")) == 6
            router.handle = no_threes
            mixed = [r async for r in client.stream(numbers(), chunk=2, concurrency=1, return_exceptions=True)]
            assert [getattr(r, "code", r) for r in mixed] == [0, 1, "model_error", "model_error", 4, 5, 6, 7, 8, 9]
            with pytest.raises(GpuPoolError, match="three"):
                [r async for r in client.stream(numbers())]

    run_async(main)


def test_sample_that_cannot_be_sent_is_an_error_in_its_place(client: Client, router: FakeRouter, run_async: Runner) -> None:
    samples = [0, {1}, 2]
    assert [r.code for r in client.map(samples, return_exceptions=True)] == ["ok", "invalid_input", "ok"]
    got: list[object] = []
    with pytest.raises(InvalidInput):
        got.extend(r.result for r in client.map(samples))
    assert got == [0]

    async def main() -> None:
        async with AsyncClient(router.endpoint) as other:
            mixed = [r async for r in other.map(samples, return_exceptions=True)]
            assert [r.code for r in mixed] == ["ok", "invalid_input", "ok"]

    run_async(main)


def test_async_map_hands_out_replies_while_its_source_waits(router: FakeRouter, run_async: Runner) -> None:
    """A source may make each sample of the reply before, far below the bound."""

    async def main() -> None:
        replies: asyncio.Queue[int] = asyncio.Queue()

        async def chain() -> AsyncIterator[int]:
            yield 1
            for _ in range(5):
                yield 2 * await replies.get()

        async with AsyncClient(router.endpoint) as client:
            got = []
            async for reply in client.map(chain(), concurrency=64):
                got.append(reply.result)
                replies.put_nowait(reply.result)
            assert got == [1, 2, 4, 8, 16, 32]

    run_async(main)


def test_async_map_that_is_dropped_closes_its_source(router: FakeRouter, run_async: Runner) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def source() -> AsyncIterator[int]:
            try:
                yield 1
                await asyncio.sleep(3600)
            finally:
                ended.set()

        async with AsyncClient(router.endpoint) as client:
            async with contextlib.aclosing(client.map(source())) as replies:  # type: ignore[type-var]
                assert (await anext(aiter(replies))).result == 1
            assert ended.is_set()

    run_async(main)


def test_closing_cancels_what_a_suspended_map_has_open(router: FakeRouter) -> None:
    client = Client(router.endpoint)
    replies = client.map(range(8), concurrency=4)
    router.handle = lambda header, frames: echo(header, frames) if len(router.seen) == 1 else []
    assert next(replies).result == 0
    client.close()
    router.wait_for("cancel", 3)
    with pytest.raises(Cancelled):
        next(replies)
