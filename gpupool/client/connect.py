"""One DEALER socket to a pool, set up so that the client always knows which requests a lost connection has swallowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

#: How long closing may wait for `cancel` messages to leave.
LINGER_MS: Final = 200


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """CURVE encryption: the pool's public key, and the client's own secret key (made up where the pool does not check it). Z85."""

    server_key: str
    secret_key: str | None = None


def open_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: CurveKeys | None) -> Link:
    """Connect to a pool; returns at once, whether or not it is there.

    Raises:
        ValueError: for an endpoint or key that ZeroMQ refuses.
    """
    sock = context.socket(zmq.DEALER)
    try:
        sock.linger = LINGER_MS
        # Nothing is queued for a connection that is not there, and what was queued for one that breaks is dropped: so after a
        # DISCONNECTED event every request sent before it is known to be lost, and none is delivered behind our back.
        sock.immediate = True
        sock.rcvhwm = 0  # bounded by our own open requests; a limit here would make the pool drop replies
        sock.reconnect_ivl = 50
        sock.reconnect_ivl_max = 1000
        # A host that vanished sends no FIN. Long enough for a router that is only stopped for a while.
        sock.heartbeat_ivl = 10_000
        sock.heartbeat_timeout = 30_000
        if curve is not None:
            public, secret = (None, curve.secret_key) if curve.secret_key else zmq.curve_keypair()
            sock.curve_secretkey = _key(secret)
            sock.curve_publickey = public or zmq.curve_public(_key(secret))
            sock.curve_serverkey = _key(curve.server_key)
        link = Link(sock, sock.get_monitor_socket(int(zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED)))
    except BaseException:
        sock.close(0)
        raise
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as e:
        link.close()
        raise ValueError(f"cannot connect to {endpoint!r}: {e}") from None
    return link


def _key(key: str | bytes | None) -> bytes:
    raw = key.encode() if isinstance(key, str) else key or b""
    if len(raw) != 40:
        raise ValueError(f"a CURVE key has 40 characters in Z85, this one has {len(raw)}")
    return raw


class Link:
    """The socket with its monitor; every call returns at once.

    Between a disconnection and libzmq's taking down the connection's queue there is a moment in which that queue still takes
    messages, and loses them: so nothing is sent until the next connection has shaken hands.
    """

    def __init__(self, sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self.socket = sock
        self.monitor = monitor
        self.fds = (int(sock.fd), int(monitor.fd))
        self.up = False

    def lost(self) -> bool:
        """Whether the connection broke since the last look. Look before each send, or the book-keeping is wrong."""
        lost = False
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            self.up = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED
            lost |= not self.up
            self.socket.get(zmq.EVENTS)  # makes libzmq take note of the old queue's end
        return lost

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

    def close(self) -> None:
        """Close both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()
