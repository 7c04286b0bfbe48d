"""The client's socket: what it knows of its connection."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from gpupool.client.connect import open_socket


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_nothing_is_sent_between_a_disconnection_and_the_next_handshake() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    link = open_socket(context, f"tcp://127.0.0.1:{port}", None)
    assert not link.send([b"too early"])
    losses = 0

    def look() -> bool:
        nonlocal losses
        losses += link.lost()
        return link.up

    eventually(look)
    eventually(lambda: link.send([b"first"]))
    assert router.recv_multipart()[1:] == [b"first"]
    router.close(0)
    eventually(lambda: not look())
    assert losses == 1
    assert not link.send([b"lost"])
    assert not link.ready(to_send=True)
    router = context.socket(zmq.ROUTER)
    eventually(lambda: bound(router, port))
    eventually(look)
    eventually(lambda: link.send([b"second"]))
    assert router.recv_multipart()[1:] == [b"second"]
    assert losses == 1
    link.close()
    router.close(0)
    context.term()


def bound(router: zmq.Socket[bytes], port: int) -> bool:
    try:
        router.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError:
        return False
    return True
