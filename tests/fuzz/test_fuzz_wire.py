"""Random messages over real sockets to a real pool: it lives, the good are served, the books balance, and nothing grows."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.messages import GOOD, MESSAGES, Good, Message
from support.running import RawClient, RunningPool

pytestmark = pytest.mark.processes
_PATIENCE_S = 20.0
#: A request with an id that a cancel names may be cancelled instead.
_MAY = {"ok", "cancelled"}
SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


class Target:
    """A pool, a neighbour who behaves, and the figures from before."""

    def __init__(self, pool: RunningPool) -> None:
        self.pool = pool
        self.neighbour = pool.client()
        self.router = psutil.Process(pool.status()["router"]["pid"])
        self.asked = 0

    def neighbour_is_served(self) -> None:
        self.asked += 1
        header, body = self.neighbour.call({"neighbour": self.asked}, within=_PATIENCE_S)
        assert (header["code"], body) == ("ok", {"neighbour": self.asked})

    def books_balance(self) -> None:
        router = self.pool.status()["router"]
        assert router["pid"] == self.router.pid, "the router was replaced"
        assert router["accepted_total"] == sum(router["replied_total"].values()) + router["pending"] + router["in_flight"], (
            router
        )

    def footprint(self) -> tuple[int, float]:
        return self.router.num_fds(), self.router.memory_info().rss / 2**20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One pool for all examples; nothing may have gone wrong in it in the end, and it holds no more than at first."""
    with RunningPool(Path(tmp_path_factory.mktemp("fuzz"))) as pool:
        target = Target(pool.start())
        warm(target)
        descriptors, rss = target.footprint()
        yield target
        target.neighbour_is_served()
        pool.wait(lambda s: not s["router"]["pending"] and not s["router"]["in_flight"])
        after = target.footprint()
        end = time.monotonic() + 10.0
        while after[0] > descriptors + 5 and time.monotonic() < end:  # libzmq closes what has left in its own time
            time.sleep(0.1)
            after = target.footprint()
        assert after[0] <= descriptors + 5, f"descriptors: {descriptors}, then {after[0]}"
        assert after[1] <= rss + 16, f"RSS of the router: {rss:.1f} MiB, then {after[1]:.1f}"
        assert all(worker["restarts"] == 0 for worker in pool.status()["workers"]), "a worker did not survive it"
        target.neighbour.close()
        bad = [r for r in pool.records() if r["level"] == "error" or "traceback" in r]
        assert not bad, bad[:3]


def warm(target: Target) -> None:
    """Have allocated what any load allocates: replies to a thousand messages."""
    with target.pool.client() as client:
        for n in range(1000):
            client.send({"n": n}, id=str(n))
        client.collect(1000)


def speak(target: Target, messages: list[Message], *, kind: int = zmq.DEALER) -> None:
    """Send messages on one connection of their own, and check every reply that comes."""
    with target.pool.client(kind) as client:
        owed: dict[str, Good] = {}
        for number, message in enumerate(messages):
            if isinstance(message, Good):
                owed[f"{GOOD}{number}"] = message
                header = {"v": 1, "id": f"{GOOD}{number}", "timeout_ms": 60_000, **message.header}
                client.socket.send_multipart([msgpack.packb(header), msgpack.packb(message.body)])
            else:
                client.socket.send_multipart(message.frames)
        client.socket.send_multipart([msgpack.packb({"v": 1, "id": "last", "type": "ping"})])
        replies, seen_last = 0, False
        end = time.monotonic() + _PATIENCE_S
        while owed or not seen_last:
            assert client.socket.poll(max(0, int(1000 * (end - time.monotonic())))), f"no reply to {sorted(owed)}, {seen_last=}"
            frames = client.socket.recv_multipart()
            if not frames[0]:
                del frames[0]  # it was sent one in front, as REQ sockets do
            header = msgpack.unpackb(frames[0], strict_map_key=False)
            assert header["v"] == 1
            name = header.get("id")
            if name == "last":
                seen_last = True
                continue
            replies += 1
            assert replies <= len(messages), "more replies than messages"
            if isinstance(name, str) and name.startswith(GOOD):
                assert name in owed, f"a second reply to {name}: {header}"
                check(owed.pop(name), header, frames[1:])
        assert not client.socket.poll(0) or is_odd(client)


def is_odd(client: RawClient) -> bool:
    """Whether what still came is an answer to rubbish that some worker had to look at."""
    header = msgpack.unpackb(client.socket.recv_multipart()[-2], strict_map_key=False)
    return not str(header.get("id")).startswith(GOOD)


def check(message: Good, header: dict[str, Any], frames: list[bytes]) -> None:
    assert header["code"] in _MAY, (message, header)
    if header["code"] == "ok":
        assert msgpack.unpackb(frames[0], strict_map_key=False) == message.body


@settings(max_examples=250, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(messages=st.lists(MESSAGES, min_size=8, max_size=40))
def test_whatever_is_sent_the_good_are_answered_once_and_the_neighbour_is_served(
    target: Target, messages: list[Message]
) -> None:
    speak(target, messages)

    target.neighbour_is_served()
    target.books_balance()


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(frames=st.lists(st.lists(st.binary(max_size=50), min_size=1, max_size=4), min_size=1, max_size=5))
def test_req_sockets_that_send_anything_get_at_most_one_answer_each(target: Target, frames: list[list[bytes]]) -> None:
    for message in frames:
        with target.pool.client(zmq.REQ) as client:
            client.socket.send_multipart(message)
            target.neighbour_is_served()
            if client.socket.poll(50):
                client.socket.recv_multipart()
    with target.pool.client(zmq.REQ) as client:
        client.socket.send_multipart([msgpack.packb({"v": 1}), msgpack.packb("good")])
        assert client.socket.poll(int(1000 * _PATIENCE_S))
        header, body = client.socket.recv_multipart()
        assert (msgpack.unpackb(header)["code"], msgpack.unpackb(body)) == ("ok", "good")
    target.books_balance()


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300), seed=st.integers(0, 2**32), whole=st.booleans())
def test_bytes_on_the_port_that_are_not_zeromq_harm_nobody(target: Target, data: bytes, seed: int, whole: bool) -> None:
    """With and without a correct ZMTP greeting in front, so that both the handshake and what comes behind it are met."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    junk = data + random.Random(seed).randbytes(seed % 5000)
    with socket.create_connection(("127.0.0.1", target.pool.port), timeout=5) as stranger:
        try:
            stranger.sendall((greeting if whole else b"") + junk)
        except OSError:
            pass  # hung up on us already, which is its right
        target.neighbour_is_served()
    target.books_balance()


def test_a_flood_of_cancels_and_of_one_id_again_and_again_is_answered_once_each(target: Target) -> None:
    body = msgpack.packb({"x": 1})
    with target.pool.client() as client:
        for n in range(2000):
            client.socket.send_multipart([msgpack.packb({"v": 1, "id": str(n % 50)}), body])
            client.socket.send_multipart([msgpack.packb({"v": 1, "id": str(n % 77), "type": "cancel"})])
        codes: dict[str, int] = {}
        for _ in range(2000):
            reply = client.receive(_PATIENCE_S)
            assert reply, f"replies so far: {codes}"
            codes[reply[0]["code"]] = codes.get(reply[0]["code"], 0) + 1
        assert client.receive(0.2) is None
    assert set(codes) <= {"ok", "cancelled", "bad_request", "overloaded"}, codes  # bad_request: the id was still open
    assert codes["ok"]
    target.neighbour_is_served()
    target.books_balance()
