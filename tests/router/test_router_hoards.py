"""Messages that do not end: noticed by what the kernel received and nobody was handed, and cut."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from unittest import mock

import psutil
import pytest

from gpupool.router.hoards import Hoards, received_bytes
from gpupool.router.peers import Peers
from support.router_process import RouterProcess, ask, reply

LARGE = 300 << 20
STRANGE = 1 << 30


class World:
    """Two connections whose received bytes a test sets, in a process of the size it sets."""

    def __init__(self) -> None:
        self.peers = Peers()
        self.sizes: dict[int, int | None] = {}
        self.cut: list[int] = []
        self.resident, self.held, self.trims, self.now = 0, 0, 0, 0.0
        self.hoards = Hoards(
            self.peers, 160, mock.Mock(), lambda: self.held, received=lambda fd: self.sizes[fd], cut=self.cut.append,
            resident=lambda: self.resident, trim=self.trim, clock=lambda: self.now,
        )  # fmt: skip
        for fd in (7, 8):
            self.peers.accepted(fd, 0.0)
            self.peers.admit()
            self.sizes[fd] = 0

    def trim(self) -> None:
        self.trims += 1

    def look(self, resident: int) -> None:
        self.resident = resident
        self.now += 0.2
        self.hoards.look()

    def speak(self, fd: int) -> None:
        client = b"c%d" % fd
        if client not in self.peers.known:
            assert self.peers.arrived(client, fd, f"{self.peers._serial} ")


def test_who_sends_much_and_nothing_that_ends_is_cut() -> None:
    world = World()
    world.sizes[7] = 161

    world.look(LARGE)

    assert world.cut == [7]
    assert world.hoards.total == 1


def test_who_sends_much_in_messages_that_end_is_not() -> None:
    world = World()
    for n in range(1, 20):
        world.speak(8)
        world.sizes[8] = 1000 * n
        world.look(LARGE)

    assert world.cut == []


def test_who_was_heard_before_is_cut_when_it_ends_no_message_any_more() -> None:
    world = World()
    world.speak(8)
    world.sizes[8] = 1000
    world.look(LARGE)
    assert world.cut == []
    world.sizes[8] = 1150
    world.look(LARGE)
    assert world.cut == []
    world.sizes[8] = 1161

    world.look(LARGE)

    assert world.cut == [8]


def test_nobody_is_looked_at_while_the_process_is_small_and_nobody_is_cut_of_whom_nothing_is_known() -> None:
    world = World()
    world.sizes[7] = 10_000
    world.look(1 << 20)
    world.sizes[7] = None
    world.look(LARGE)

    assert world.cut == []


def test_while_much_is_held_that_nobody_knows_of_less_must_end_within_some_looks() -> None:
    world = World()
    world.sizes[7] = 11
    for _ in range(4):
        world.look(STRANGE)
    assert world.cut == []
    world.look(STRANGE)
    assert world.cut == [7]


def test_known_bodies_explain_a_large_process() -> None:
    world = World()
    world.sizes[7], world.held = 11, STRANGE
    for _ in range(20):
        world.look(STRANGE)

    assert (world.cut, world.trims) == ([], 0)


def test_what_was_freed_is_given_back_now_and_then() -> None:
    world = World()
    for _ in range(60):
        world.look(LARGE)

    assert world.trims == 2


def test_the_kernel_tells_what_tcp_received_and_nothing_of_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        client.sendall(bytes(5000))
        until = time.monotonic() + 10
        while received_bytes(accepted.fileno()) != 5000:
            assert time.monotonic() < until
        one, other = socket.socketpair()
        assert received_bytes(one.fileno()) is None
        fd = one.fileno()
        for sock in (one, other, accepted):
            sock.close()
        assert received_bytes(fd) is None


def greeted(endpoint: str) -> socket.socket:
    """A ZMTP 3.0 connection by hand, past its handshake."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    _exactly(sock, 64)
    sock.sendall(b"\x04" + bytes([len(body)]) + body)
    assert _exactly(sock, 2)[0] == 4  # its READY: we are let in
    return sock


def _exactly(sock: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        got += (part := sock.recv(count - len(got)))
        assert part, "the router has hung up"
    return got


@pytest.mark.processes
def test_an_endless_message_ends_its_connection_and_nothing_else(start_router: Callable[..., RouterProcess]) -> None:
    router = start_router(max_message_bytes=8 << 20)
    worker = router.worker()
    calm = router.client()
    frame = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)  # long, and more to come
    process = psutil.Process(router.process.pid)
    largest, sent = 0, 0
    with greeted(router.bind[0]) as attacker, pytest.raises(OSError):
        while sent < 4096:
            attacker.sendall(frame)
            sent += 1
            largest = max(largest, process.memory_info().rss)
    assert largest < 1 << 30
    until = time.monotonic() + 20
    while process.memory_info().rss > 256 << 20:
        assert time.monotonic() < until
        time.sleep(0.05)

    assert router.stats()["endless_total"] == 1
    ask(calm)
    worker.echo(worker.work())
    assert reply(calm)[0]["code"] == "ok"
