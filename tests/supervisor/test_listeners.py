"""Listening sockets: bound once, taken over by libzmq again and again, and nothing taken from anybody."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from gpupool.supervisor.listeners import BindError, Listener, Listeners


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpupool-") as made:  # a socket's path must be short
        yield Path(made)


def opened(*addresses: str, folder: Path) -> closing[Listeners]:
    return closing(Listeners(addresses, folder / "workers.sock"))


@pytest.mark.parametrize(
    ("configured", "host"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1"),
        ("tcp://127.0.0.1:*", "127.0.0.1"),
        ("tcp://localhost:0", "127.0.0.1"),
        ("tcp://lo:0", "127.0.0.1"),
        ("tcp://*:0", "0.0.0.0"),
        ("tcp://*:*", "0.0.0.0"),
        ("tcp://0.0.0.0:0", "0.0.0.0"),
        ("tcp://[::1]:0", "[::1]"),
        ("tcp://[::]:0", "[::]"),
    ],
)
def test_what_comes_of_an_address_is_told_and_reachable(configured: str, host: str) -> None:
    if "[" in configured and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with closing(Listener(configured, 0o117)) as listener:
        where, _, port = listener.address.removeprefix("tcp://").rpartition(":")
        assert where == host
        assert int(port) > 0
        family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
        with socket.socket(family) as client:  # "[::]" takes IPv4 too, as libzmq's own does
            client.settimeout(5)
            client.connect(("::1" if family == socket.AF_INET6 else "127.0.0.1", int(port)))


def test_every_router_gets_the_same_connections_and_those_that_came_between(folder: Path) -> None:
    path = folder / "clients.sock"
    with opened("tcp://127.0.0.1:0", f"ipc://{path}", folder=folder) as listeners, zmq.Context() as context:
        addresses = [each.address for each in listeners.clients]
        for life in range(3):
            clients = [context.socket(zmq.REQ) for _ in addresses]
            for client, address in zip(clients, addresses, strict=True):
                client.linger = 0
                client.connect(address)
                client.send(str(life).encode())
                assert not client.poll(50)  # connected, and nobody is there
            process = zmq.Context()  # whose end is waited for: until then its thread would accept the next one's clients
            router = process.socket(zmq.ROUTER)
            for each in listeners.clients:
                router.set(zmq.USE_FD, os.dup(each.fileno()))
                router.bind(each.address)
            for _ in clients:
                assert router.poll(5000)
                router.send_multipart(router.recv_multipart())
            for client in clients:
                assert client.poll(5000)
                assert client.recv() == str(life).encode()
                client.close()
            process.destroy(linger=0)
            assert path.exists()


def test_sockets_in_the_file_system_have_their_modes_and_go_with_the_pool(folder: Path) -> None:
    path = folder / "clients.sock"
    with opened(f"ipc://{path}", folder=folder) as listeners:
        modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, folder / "workers.sock")]
        assert [each.address for each in listeners.clients] == [f"ipc://{path}"]
    assert modes == [0o660, 0o600]
    assert not list(folder.iterdir())
    listeners.close()  # twice does no harm


def test_a_socket_left_behind_is_replaced_and_a_live_one_or_a_file_is_not(folder: Path) -> None:
    stale, live, file = folder / "stale", folder / "live", folder / "file"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(stale))
    file.write_text("keep me")

    with opened(f"ipc://{stale}", folder=folder), closing(Listener(f"ipc://{live}", 0o117)):
        for path, words in ((live, "already in use"), (file, "is no socket")):
            with pytest.raises(BindError, match=f"{path}: .*{words}"):
                Listener(f"ipc://{path}", 0o117)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(live))
    assert file.read_text() == "keep me"


def test_a_file_that_somebody_else_put_there_is_not_taken_away(folder: Path) -> None:
    path = folder / "clients.sock"
    with opened(f"ipc://{path}", folder=folder):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_an_address_that_cannot_be_bound_is_named_and_leaves_nothing_open(folder: Path) -> None:
    path = folder / "clients.sock"
    with closing(Listener("tcp://127.0.0.1:0", 0o117)) as taken:
        for address in (taken.address, "tcp://no-such-host.invalid:0", f"tcp://{'x' * 64}..y:0", f"ipc://{folder}/no/such"):
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(BindError) as failed:
                Listeners([f"ipc://{path}", address], folder / "workers.sock")
            assert str(failed.value).startswith(f"cannot bind {address}: ")
            assert len(os.listdir("/proc/self/fd")) == before
            assert not path.exists()


def test_the_workers_socket_is_made_anew_where_it_was_removed(folder: Path) -> None:
    with opened(folder=folder) as listeners:
        (folder / "workers.sock").unlink()
        listeners.reopen_workers()
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(str(folder / "workers.sock"))
        listeners.workers.close()
        assert not list(folder.iterdir())
