"""The router's two ROUTER sockets: how they are opened, drained and sent on, without ever waiting.

Two clients with one routing id: the first keeps it, the second is ignored by libzmq for good (hand-over would cut the first off
silently, and give its replies to the newcomer, whoever that is). Clients should leave the routing id to libzmq, as ours does.

Hard cap: a frame above twice `max_message_bytes` cuts its connection, without a reply. Up to there a message that is too large is
answered `too_large`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from typing import Final

import msgpack
import zmq

from gpupool.spec import RouterSpec
from gpupool.wire import MAX_BUFFERS, VERSION

from .outbox import Sent

#: Messages per connection that libzmq may hold for us, and for a client that does not read. It counts messages, not bytes, and we
#: read at once: more would only let memory grow when we cannot.
_CLIENT_HWM: Final = 128
_WORKER_HWM: Final = 1000
#: A client whose host vanished is noticed within three of these.
_HEARTBEAT_MS: Final = 10_000
#: From here on a frame is sent without a copy; below, a copy is cheaper than the bookkeeping.
_ZERO_COPY_BYTES: Final = 1 << 20
#: Frames of a message beyond which the rest is read and thrown away: it will be refused anyhow.
_MAX_FRAMES: Final = MAX_BUFFERS + 4

#: No request has an empty id, so nobody can take this for the reply to his.
_REPLY_TO_NOTHING: Final[bytes] = msgpack.packb(
    {"v": VERSION, "id": "", "code": "cancelled", "retryable": False, "message": "for a connection that has ended"}
)

_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
_LAST: Final = int(zmq.NOBLOCK)


def open_clients(
    context: zmq.Context[zmq.Socket[bytes]], spec: RouterSpec, guard: Callable[[zmq.Socket[bytes]], object]
) -> zmq.Socket[bytes]:
    """Open the clients' socket, guarded, on the listeners that were inherited."""
    sock = context.socket(zmq.ROUTER)
    sock.set(zmq.ROUTER_MANDATORY, 1)
    sock.set(zmq.SNDHWM, _CLIENT_HWM)
    sock.set(zmq.RCVHWM, _CLIENT_HWM)
    sock.set(zmq.MAXMSGSIZE, 2 * spec.max_message_bytes)
    sock.set(zmq.LINGER, 0)
    sock.set(zmq.HANDSHAKE_IVL, _HEARTBEAT_MS)
    sock.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.set(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
    sock.set(zmq.TCP_KEEPALIVE, 1)
    sock.set(zmq.TCP_KEEPALIVE_IDLE, 60)
    guard(sock)
    for fd, address in zip(spec.bind_fds, spec.bind, strict=True):
        _listen(sock, fd, address)
    return sock


def open_workers(context: zmq.Context[zmq.Socket[bytes]], spec: RouterSpec) -> zmq.Socket[bytes]:
    """Open the workers' socket on the listener that was inherited."""
    sock = context.socket(zmq.ROUTER)
    sock.set(zmq.ROUTER_MANDATORY, 1)
    sock.set(zmq.SNDHWM, _WORKER_HWM)
    sock.set(zmq.RCVHWM, _WORKER_HWM)
    sock.set(zmq.LINGER, 0)
    _listen(sock, spec.workers_fd, spec.workers_endpoint)
    return sock


def readable(sock: zmq.Socket[bytes]) -> bool:
    """Whether messages wait. To be asked after every drain and after sends: libzmq's descriptor tells of a change once only."""
    return bool(int(sock.get(zmq.EVENTS)) & zmq.POLLIN)


def drain(
    sock: zmq.Socket[bytes],
    handle: Callable[[bytes, list[bytes], float], None],
    now: float,
    *,
    max_messages: int,
    max_bytes: int,
    known: Container[bytes] | None = None,
    meet: Callable[[bytes, zmq.Frame], bool] | None = None,
) -> bool:
    """Hand over the messages that wait as (routing id, frames, now); True when a bound ended it and more may wait.

    With `known`, `meet` says of every peer that is not in there whether its message is taken, by the first frame; it must not raise.
    """
    receive = sock.recv
    size = 0
    for _ in range(max_messages):
        try:
            peer = receive(_LAST)
        except zmq.Again:
            return False
        # A frame object knows whether another one follows; asking the socket would cost as much as a frame.
        part = receive(_LAST, copy=False)
        taken = known is None or peer in known or meet is None or meet(peer, part)
        frame = part.bytes
        size += len(frame)
        frames = [frame]
        while part.more:
            part = receive(_LAST, copy=False)
            if len(frames) < _MAX_FRAMES:
                frame = part.bytes
                size += len(frame)
                frames.append(frame)
        if taken:
            handle(peer, frames, now)
        if size >= max_bytes:
            return True
    return True


def send(sock: zmq.Socket[bytes], frames: Sequence[bytes], still: Callable[[], bool] | None = None) -> Sent:
    """Send one message, the peer's routing id first, if that is possible now. Only its first frame can be refused.

    `still` is asked when libzmq has chosen the connection: whether the one that is meant is open. If it is not, the routing id may be
    another's by now, who is sent a reply to nothing instead: a message that was begun has to be ended.
    """
    # pyzmq's own wrapper around this looks for options of other socket types, with every frame.
    put: Callable[..., object] = super(zmq.Socket, sock).send
    try:
        put(frames[0], _MORE)
    except zmq.Again:
        return Sent.BUSY
    except zmq.ZMQError as e:
        if e.errno == zmq.EHOSTUNREACH:
            return Sent.GONE
        raise
    if still is not None and not still():
        put(_REPLY_TO_NOTHING, _MORE)
        put(b"", _LAST)
        return Sent.GONE
    last = len(frames) - 1
    for i in range(1, last):
        frame = frames[i]
        put(frame, _MORE, len(frame) < _ZERO_COPY_BYTES)
    frame = frames[last]
    put(frame, _LAST, len(frame) < _ZERO_COPY_BYTES)
    return Sent.OK


def _listen(sock: zmq.Socket[bytes], fd: int, address: str) -> None:
    """Take over a socket that listens already. It stays the supervisor's: libzmq closes our descriptor only, and unlinks nothing."""
    os.set_inheritable(fd, False)
    sock.set(zmq.USE_FD, fd)  # read by the next bind, which then only looks at the address's scheme and form
    sock.bind(address)
