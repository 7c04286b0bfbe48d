"""The wire between router and worker: many requests in one message, a batch's replies in one.

Frames cost more than bytes here (about 1.2 us each, measured), so small bodies travel inside one packed list and only bodies above
INLINE_BYTES get frames of their own. A worker (DEALER) opens with HELLO; the router (ROUTER) answers WELCOME and from then on sends
WORK and CANCEL; the worker sends RESULTS, and on leaving BYE with the tickets that it never started.

A ticket is the router's number for one dispatch of one request; it is never used twice, so an answer to an older dispatch is told
apart by its number alone. A worker's HELLO carries slot, incarnation, and the secret of the pool's present run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Final, NamedTuple, Protocol

import msgpack

INLINE_BYTES: Final = 16 * 1024

HELLO: Final = b"H"
WELCOME: Final = b"A"
WORK: Final = b"W"
CANCEL: Final = b"C"
RESULTS: Final = b"R"
BYE: Final = b"B"


class LinkError(Exception):
    """A message between router and worker that cannot be read: a bug or a stranger on the socket."""


class WorkFlag(IntFlag):
    """How a request is to be run."""

    NONE = 0
    MANY = 1  # the body is a list of samples
    ALONE = 2  # in a batch of its own: it is suspected of having killed a worker
    URGENT = 4  # before all that waits: its client has nothing else here, and another one has much
    TRACED = 8  # its result is to tell when things happened, not only how long they took


@dataclass(slots=True)
class Work:
    """One request on its way to a worker. `timeout_s` is what is left of its deadline when it is sent."""

    ticket: int
    model: int  # index into the pool's models
    flags: int
    rows: int
    timeout_s: float
    priority: int
    frames: Sequence[bytes]  # body, then buffers


class WorkLike(Protocol):
    """What `pack_work` reads: a `Work`, or the router's own record of a request as it stands."""

    ticket: int
    model: int
    flags: int
    rows: int
    timeout_s: float
    priority: int
    frames: Sequence[bytes]


class Marks(NamedTuple):
    """When things happened to a traced request in its worker; instants are monotonic seconds, which all processes of a host share."""

    arrived: float
    preprocess_at: float  # 0: the model has none
    forward_at: float  # when the first of it began
    forward_end: float  # when the last of it ended
    postprocess_at: float  # when that of its last batch began
    ended: float
    batch: int  # number of the last batch with any of it, in its worker
    batch_at: float  # when that one's forward began
    rows: int  # of that batch
    bucket: int
    reason: str  # why that batch closed


@dataclass(slots=True)
class Result:
    """One request's end in a worker: `ok` with reply frames (body, buffers), or a code with its message."""

    ticket: int
    code: str
    message: str = ""
    field: str = ""
    batch_size: int = 0
    length: int = 0
    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0
    postprocess_s: float = 0.0
    started: bool = True  # whether the model's preprocess or forward has had any of it
    frames: Sequence[bytes] = ()
    marks: Marks | None = None  # of a traced request that a batch has run


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker that has loaded its models and asks for work."""

    slot: int
    incarnation: int
    epoch: int  # the router process it means to talk to
    token: str
    batch_limit: int
    threads: int = 0  # that preprocess, of the model with the most


def pack_hello(hello: Hello) -> list[bytes]:
    """Encode HELLO."""
    values = [hello.slot, hello.incarnation, hello.epoch, hello.token, hello.batch_limit, hello.threads]
    return [HELLO, msgpack.packb(values)]


def unpack_hello(frames: Sequence[bytes]) -> Hello:
    """Decode HELLO; raises LinkError."""
    values = _list(frames)
    if len(values) != 6 or not isinstance(values[3], str) or not all(type(v) is int for v in (*values[:3], *values[4:])):
        raise LinkError("malformed hello")
    return Hello(*values)


def pack_tickets(kind: bytes, tickets: Iterable[int]) -> list[bytes]:
    """Encode WELCOME (the epoch), CANCEL or BYE (tickets)."""
    return [kind, msgpack.packb(list(tickets))]


def unpack_tickets(frames: Sequence[bytes]) -> list[int]:
    """Decode WELCOME, CANCEL or BYE; raises LinkError."""
    values = _list(frames)
    if not all(type(v) is int for v in values):
        raise LinkError("malformed ticket list")
    return values


def pack_work(items: Iterable[WorkLike]) -> list[bytes]:
    """Encode WORK for one worker."""
    extra: list[bytes] = []
    rows = [
        (w.ticket, w.model, w.flags, w.rows, w.timeout_s, w.priority, _inline(w.frames, extra))
        for w in items
    ]  # fmt: skip
    return [WORK, msgpack.packb(rows), *extra]


def unpack_work(frames: Sequence[bytes]) -> list[Work]:
    """Decode WORK; raises LinkError."""
    try:
        return [Work(*(*row[:6], _outline(row[6], frames))) for row in _list(frames)]
    except (TypeError, IndexError, ValueError) as e:
        raise LinkError(f"malformed work: {e}") from None


def pack_results(items: Iterable[Result]) -> list[bytes]:
    """Encode RESULTS."""
    extra: list[bytes] = []
    rows = [
        (
            r.ticket, r.code, r.message, r.field, r.batch_size, r.length,
            r.queue_s, r.preprocess_s, r.forward_s, r.postprocess_s, r.started, _inline(r.frames, extra), r.marks,
        )
        for r in items
    ]  # fmt: skip
    return [RESULTS, msgpack.packb(rows), *extra]


def unpack_results(frames: Sequence[bytes]) -> list[Result]:
    """Decode RESULTS; raises LinkError."""
    try:
        return [Result(*(*row[:11], _outline(row[11], frames), row[12] and Marks(*row[12]))) for row in _list(frames)]
    except (TypeError, IndexError, ValueError) as e:
        raise LinkError(f"malformed results: {e}") from None


def _inline(frames: Sequence[bytes], extra: list[bytes]) -> list[bytes | int]:
    if all(len(f) <= INLINE_BYTES for f in frames):
        return list(frames)
    packed: list[bytes | int] = []
    for f in frames:
        if len(f) <= INLINE_BYTES:
            packed.append(f)
        else:
            extra.append(f)
            packed.append(len(extra) - 1)
    return packed


def _outline(packed: list[bytes | int], frames: Sequence[bytes]) -> list[bytes]:
    # One that is no index, or points before the bodies, raises as a wrong index does.
    return [f if isinstance(f, bytes) else frames[2 + f if f >= 0 else len(frames)] for f in packed]


def _list(frames: Sequence[bytes]) -> list[Any]:
    try:
        values = msgpack.unpackb(frames[1], raw=False)
    except Exception as e:
        raise LinkError(f"not msgpack: {type(e).__name__}") from None
    if type(values) is not list:
        raise LinkError("not a list")
    return values
