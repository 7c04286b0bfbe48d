"""The router's two ROUTER sockets: how they are opened, drained and sent on, without ever waiting.

Two clients with one routing id: the first keeps it, the second is ignored by libzmq for good (hand-over would cut the first off
silently, and give its replies to the newcomer, whoever that is). Clients should leave the routing id to libzmq, as ours does.

Hard cap: a frame above twice `max_message_bytes` cuts its connection, without a reply. Up to there a message that is too large is
answered `too_large`.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
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


class BindError(Exception):
    """An address cannot be bound; the message names it."""


def open_clients(
    context: zmq.Context[zmq.Socket[bytes]], spec: RouterSpec, guard: Callable[[zmq.Socket[bytes]], object]
) -> tuple[zmq.Socket[bytes], list[str]]:
    """Bind the clients' socket, guarded; return it with the addresses that came of it (port 0 is resolved).

    Raises:
        BindError: for the first address that fails.
    """
    sock = context.socket(zmq.ROUTER)
    sock.set(zmq.ROUTER_MANDATORY, 1)
    sock.set(zmq.SNDHWM, _CLIENT_HWM)
    sock.set(zmq.RCVHWM, _CLIENT_HWM)
    sock.set(zmq.MAXMSGSIZE, 2 * spec.max_message_bytes)
    sock.set(zmq.LINGER, 0)
    sock.set(zmq.BACKLOG, 1024)
    sock.set(zmq.HANDSHAKE_IVL, _HEARTBEAT_MS)
    sock.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.set(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
    sock.set(zmq.TCP_KEEPALIVE, 1)
    sock.set(zmq.TCP_KEEPALIVE_IDLE, 60)
    sock.set(zmq.IPV6, any("[" in address for address in spec.bind))
    guard(sock)
    with _umask(0o117):
        return sock, [_bind(sock, address) for address in spec.bind]


def open_workers(context: zmq.Context[zmq.Socket[bytes]], spec: RouterSpec) -> zmq.Socket[bytes]:
    """Bind the workers' socket, for our own user only.

    Raises:
        BindError: when it cannot be bound.
    """
    sock = context.socket(zmq.ROUTER)
    sock.set(zmq.ROUTER_MANDATORY, 1)
    sock.set(zmq.SNDHWM, _WORKER_HWM)
    sock.set(zmq.RCVHWM, _WORKER_HWM)
    sock.set(zmq.LINGER, 0)
    with _umask(0o177):
        _bind(sock, spec.workers_endpoint)
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


def _bind(sock: zmq.Socket[bytes], address: str) -> str:
    if address.startswith("ipc://"):
        _free(address)
    try:
        sock.bind(address)
    except zmq.ZMQError as e:
        raise BindError(f"cannot bind {address}: {e.strerror}") from None
    bound = sock.get(zmq.LAST_ENDPOINT)
    return bound.decode().rstrip("\0") if isinstance(bound, bytes) else str(bound)


def _free(address: str) -> None:
    """Make sure that binding takes nothing from anybody: libzmq unlinks whatever is at the path, a live pool's socket too.

    Raises:
        BindError: something else is there, or somebody listens.
    """
    path = address.removeprefix("ipc://")
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise BindError(f"cannot bind {address}: there is something at that path that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # left behind by somebody who is gone
        except OSError as e:
            raise BindError(f"cannot bind {address}: {e.strerror or e}") from None
    raise BindError(f"cannot bind {address}: address already in use")


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
