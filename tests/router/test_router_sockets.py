"""The router's end of the clients' socket, turned by hand: what must come before what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import cast
from unittest import mock

import msgpack
import pytest
import zmq

from gpupool.router.door import Door
from gpupool.router.outbox import Sent
from gpupool.router.sockets import drain, open_clients, send
from gpupool.spec import ModelSpec, RouterSpec

Ctx = zmq.Context[zmq.Socket[bytes]]
pytestmark = pytest.mark.processes


class Front:
    """A clients' socket with its door, and no loop: each step happens when the test says so."""

    def __init__(self) -> None:
        self.context: Ctx = zmq.Context(1)
        self.gone: list[bytes] = []
        self.got: list[tuple[bytes, list[bytes]]] = []
        self.door = Door(self.context, None, mock.Mock(), gone=self.gone.append, named=lambda *_: None)
        spec = RouterSpec(
            pool="p", epoch=1, token="t", bind=("tcp://127.0.0.1:0",), workers_endpoint="", slots=1, models=(ModelSpec("m"),)
        )  # fmt: skip
        self.sock, (self.endpoint,) = open_clients(self.context, spec, self.door.attach)

    def drain(self) -> bool:
        door = self.door
        return drain(
            self.sock,
            lambda peer, frames, _: self.got.append((peer, frames)),
            0.0,
            max_messages=100,
            max_bytes=1 << 20,
            known=door.peers.known,
            meet=door.meet,
        )

    def until(self, condition: Callable[[], object], within: float = 10.0) -> None:
        end = time.monotonic() + within
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.001)

    def knocked(self) -> bool:
        return bool(self.door._zap.poll(0))

    def let_in(self, drain: Callable[[], bool] | None = None) -> None:
        """Answer the one client that knocks."""
        self.until(self.knocked)
        assert not self.door.answer(time.monotonic(), drain or self.drain)

    def close(self) -> None:
        self.door.close(self.sock)
        self.sock.close(0)
        self.context.term()


class Life:
    """A client with an id of its own choice, whose end is sure, as that of a process."""

    def __init__(self, front: Front, identity: bytes = b"app1") -> None:
        self.context: Ctx = zmq.Context()
        self.sock = self.context.socket(zmq.DEALER)
        self.sock.linger = 0
        self.sock.setsockopt(zmq.IDENTITY, identity)
        self.sock.connect(front.endpoint)

    def end(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.close()


@pytest.mark.parametrize("read_before", [True, False])
def test_routing_id_is_free_for_the_next_life_if_the_socket_is_read_before_its_handshake_is_answered(
    front: Front, *, read_before: bool
) -> None:
    first = Life(front)
    first.sock.send(b"first")
    front.let_in()
    front.until(lambda: front.drain() or front.got)
    for i in range(20):
        first.sock.send(b"unread %d" % i)
    front.until(lambda: front.sock.poll(0))
    first.end()
    front.until(lambda: front.door._monitor.poll(0))

    second = Life(front)
    second.sock.send(b"second")
    front.let_in(None if read_before else lambda: False)
    if read_before:
        front.until(lambda: front.drain() or (b"app1", [b"second"]) in front.got)
        assert front.gone == [b"app1"]
    else:  # what it is for: libzmq does not give the id away, and never looks at that client again
        front.until(lambda: front.drain() or front.door.peers.has(b"app1") or not front.sock.poll(300))
        assert (b"app1", [b"second"]) not in front.got
    assert [frames for _, frames in front.got if frames[0].startswith(b"unread")] == []
    second.end()


def test_reply_for_a_connection_that_has_ended_becomes_nobodys(front: Front) -> None:
    client = Life(front)
    client.sock.send(b"first")
    front.let_in()
    front.until(lambda: front.drain() or front.got)

    assert send(front.sock, [b"app1", b"header", b"body"], lambda: True) is Sent.OK
    assert send(front.sock, [b"app1", b"secret", b"body", b"buffer"], lambda: False) is Sent.GONE
    assert send(front.sock, [b"app1", b"header", b"body"]) is Sent.OK
    assert client.sock.recv_multipart() == [b"header", b"body"]
    header, *rest = client.sock.recv_multipart()
    assert (msgpack.unpackb(header)["id"], rest) == ("", [b""])
    assert client.sock.recv_multipart() == [b"header", b"body"]
    client.end()
    front.until(lambda: not front.door.is_open(b"app1"))


def test_handshake_waits_for_the_socket_to_be_read_and_not_for_ever(front: Front) -> None:
    client = Life(front)
    front.until(front.knocked)

    now = time.monotonic()
    assert front.door.answer(now, lambda: True)
    assert front.door.answer(now + 0.4, lambda: True)
    assert not front.door.answer(now + 0.6, lambda: True)
    client.sock.send(b"served")
    front.until(lambda: front.drain() or front.got)
    client.end()


def test_more_reports_than_a_turn_takes_in_are_taken_in_later(front: Front) -> None:
    lives = [Life(front, b"id %d" % i) for i in range(20)]
    front.until(lambda: front.door.answer(time.monotonic(), front.drain) or front.door.peers._serial == len(lives))
    front.until(lambda: not front.door.watch(3))
    assert front.door.stats(0.0)["connections"] == 20
    for life in lives:
        life.end()
    front.until(lambda: not front.door.watch(3) and not front.door.stats(0.0)["connections"])


def test_second_connection_under_an_id_is_silent_and_warned_of_once(front: Front) -> None:
    first = Life(front)
    first.sock.send(b"first")
    front.let_in()
    front.until(lambda: front.drain() or front.got)
    second = Life(front)
    second.sock.send(b"second")
    front.let_in()
    front.until(lambda: front.drain() or not front.sock.poll(200))

    now, warning = time.monotonic(), cast("mock.Mock", front.door._log).event.warning
    front.door.look_around(now)
    assert not warning.called
    for later in (now + 20, now + 30, now + 300):
        front.door.look_around(later)
    assert warning.call_args_list == [mock.call("silent_connections", count=1, hint=mock.ANY)]
    assert front.door.stats(now + 20)["silent_connections"] == 1
    assert front.got == [(b"app1", [b"first"])]
    first.end()
    second.end()
