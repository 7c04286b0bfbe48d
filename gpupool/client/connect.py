"""One DEALER socket to a pool, set up so that the client always knows which requests a lost connection has swallowed.

libzmq connects anew by itself, and would deliver what still waits in its pipe behind our back. ZMQ_IMMEDIATE is meant against that, but
what is sent between the report of a broken connection and the pipe's end is lost without a word (seen as requests that hung until their
deadline), and a pipe that it takes away while a message of several frames is read aborts the process (fq.cpp: !_more). So we send
only between the report of a handshake and that of a break, and then make the connection, with its pipe, anew ourselves.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from gpupool.keys import is_key, read_public, read_secret

#: How long closing may wait for `cancel` messages to leave.
LINGER_MS: Final = 200
_UP: Final = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN: Final = zmq.Event.DISCONNECTED
_REFUSED: Final = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_REFUSED_AGAIN_S: Final = 1.0


#: A key as the 40 characters of its Z85 form, or the path of a file that holds it (see gpupool.keys).
Key = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """CURVE encryption: the pool's public key, and the client's own secret key. Both in Z85."""

    server_key: str
    secret_key: str = field(repr=False)


def curve_keys(server_key: Key | None, secret_key: Key | None) -> CurveKeys | None:
    """Read the keys that a client was given; None for plaintext.

    A client without a key of its own gets one for the time being, which a pool of this version does not let in.

    Raises:
        ValueError: for what is neither a key nor the file of one, and for a secret key alone: nothing would be encrypted with it.
    """
    if not server_key:
        if secret_key:
            raise ValueError("secret_key needs server_key too, the pool's public key; without it nothing would be encrypted")
        return None
    server = _key(server_key, read_public)
    return CurveKeys(server, _key(secret_key, read_secret) if secret_key else zmq.curve_keypair()[1].decode())


def _key(given: Key, read: Callable[[Key], str]) -> str:
    if isinstance(given, str) and is_key(given):
        return given
    try:
        there = Path(given).exists()
    except OSError:  # too long for a path
        there = False
    if not there:  # not shown: it may be a secret with a slip in it
        raise ValueError(
            f"a CURVE key has 40 characters in Z85, and this text of {len(os.fspath(given))} is neither one nor an existing file"
        )
    return read(given)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: CurveKeys | None) -> Link:
    """Connect to a pool; returns at once, whether or not it is there.

    Raises:
        ValueError: for an endpoint or key that ZeroMQ refuses.
    """
    sock = context.socket(zmq.DEALER)
    try:
        sock.linger = LINGER_MS
        sock.rcvhwm = 0  # bounded by our own open requests; a limit here would make the pool drop replies
        sock.reconnect_ivl = 50
        sock.reconnect_ivl_max = 1000
        # A host that vanished sends no FIN. Long enough for a router that is only stopped for a while.
        sock.heartbeat_ivl = 10_000
        sock.heartbeat_timeout = 30_000
        if curve is not None:
            sock.curve_secretkey = curve.secret_key.encode()
            sock.curve_publickey = zmq.curve_public(curve.secret_key.encode())
            sock.curve_serverkey = curve.server_key.encode()
        link = Link(sock, sock.get_monitor_socket(_UP | _REFUSED | _DOWN), endpoint)
    except BaseException:
        sock.close(0)
        raise
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as e:
        link.close()
        raise ValueError(f"cannot connect to {endpoint!r}: {e}") from None
    return link


class Link:
    """The socket with its monitor; every call returns at once."""

    def __init__(self, sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes], endpoint: str) -> None:
        self.socket = sock
        self.monitor = monitor
        self.fds = (int(sock.fd), int(monitor.fd))
        self.up = False  # there is a connection, as far as the last look tells
        self.refused = False  # the last handshake was: a wrong key, or none, or no pool at all
        self._again_at: float | None = None
        self._endpoint = endpoint

    def lost(self) -> bool:
        """Whether the connection broke since the last look. Look before each send, or the book-keeping is wrong.

        A connection that never came up is libzmq's to repeat, which waits longer and longer; only what it gives up, a refused
        handshake, is begun again from here, now and then: the key may be authorised meanwhile.
        """
        lost = False
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
            if event == _UP:
                self.up, self.refused, self._again_at = True, False, None
                continue
            lost |= self.up
            self.up = False
            if event & _REFUSED:
                self.refused = True
                if self._again_at is None:
                    self._again_at = time.monotonic() + _REFUSED_AGAIN_S
        if lost:
            self._connect_anew()
        elif self._again_at is not None and time.monotonic() >= self._again_at:
            self._again_at = None
            self._connect_anew()
        return lost

    def _connect_anew(self) -> None:
        """Drop the connection, with all that waits to be sent and answers to a life that is over, and make another."""
        self.up = False
        with contextlib.suppress(zmq.ZMQError):  # libzmq has given it up, and knows it no more
            self.socket.disconnect(self._endpoint)
        self.socket.connect(self._endpoint)

    def ready(self, *, to_send: bool) -> bool:
        """Whether a message waits, or, where there is something to send, whether it can leave."""
        return bool(int(self.socket.get(zmq.EVENTS)) & (zmq.POLLIN | zmq.POLLOUT if to_send and self.up else zmq.POLLIN))

    def send(self, message: list[bytes]) -> bool:
        """Send, or return False when there is no connection or no room."""
        if not self.up:
            return False
        try:
            self.socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Return the next message, None when none waits."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def drop(self) -> None:
        """Close both sockets at once, whatever waits to be sent."""
        self.close(0)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close both sockets."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.socket.close(linger_ms)


class Droppable(Protocol):
    """What a client that nobody closed leaves."""

    def drop(self) -> None:
        """Close it at once, in whatever thread."""


def when_forgotten(
    client: object, context: zmq.Context[zmq.Socket[bytes]], left: Iterable[Droppable]
) -> weakref.finalize[..., object]:
    """Close what a client has left when it is collected unclosed: pyzmq's own clean-up would wait for sockets that nobody turns.

    `left` is looked at then. Detach the result when the client is closed.
    """
    forgotten = weakref.finalize(client, _forget, os.getpid(), context, left)
    forgotten.atexit = False
    return forgotten


def _forget(pid: int, context: zmq.Context[zmq.Socket[bytes]], left: Iterable[Droppable]) -> None:
    if os.getpid() == pid:  # a forked child has no part in its parent's sockets
        for each in left:
            each.drop()
        context.term()
