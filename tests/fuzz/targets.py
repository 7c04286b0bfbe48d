"""What may come of any bytes in the pure parts: the parsers and the router's core. Each target takes bytes and fails when a promise is broken.

They are driven by hypothesis in the test suite, and for as long as one likes by `make fuzz`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from gpupool import link, wire
from gpupool.link import LinkError
from gpupool.samples import MAX_DEPTH, SampleError, pack_body, unpack_body
from gpupool.tensors import Tensor
from gpupool.wire import MAX_ID_BYTES, MAX_ROWS, MAX_TIMEOUT_MS, WireError
from support.router_world import RouterWorld


def header(data: bytes) -> None:
    """A request header is refused in the protocol's words, or is within its limits."""
    try:
        found = wire.parse_header(data)
    except WireError as e:
        assert len(e.message) < 500, "a refusal repeats what the peer sent"
        return
    assert found.type in wire.TYPES
    assert 0 <= found.priority <= 9
    assert found.timeout_ms is None or 0 < found.timeout_ms <= MAX_TIMEOUT_MS
    if found.id is not None:
        raw = found.id if isinstance(found.id, bytes) else found.id.encode("utf-8", "surrogatepass")
        assert 0 < len(raw) <= MAX_ID_BYTES


def reply(data: bytes) -> None:
    """A reply header is refused, or says a code."""
    try:
        assert type(wire.parse_reply(data)["code"]) is str
    except WireError:
        return


def rows(data: bytes) -> None:
    """A list that lies about its length is refused before anybody counts on it."""
    try:
        assert 0 <= wire.row_count(data) <= min(MAX_ROWS, len(data))
    except WireError:
        return


def body(data: bytes) -> None:
    """A body is refused, or is a value of bounded depth that goes back over the wire just so."""
    frames = split(data)
    try:
        value = unpack_body(frames[0], frames[1:])
    except SampleError:
        return
    assert depth(value) <= MAX_DEPTH
    packed, buffers = pack_body(value)
    assert repr(unpack_body(packed, buffers)) == repr(value)


def workers_link(data: bytes) -> None:
    """What a stranger says on the workers' socket is refused, and never anything else."""
    frames = [b"?", *split(data)]
    for read in (link.unpack_hello, link.unpack_work, link.unpack_results, link.unpack_tickets):
        try:
            read(frames)
        except LinkError:
            continue


def core(data: bytes) -> None:
    """The router's core takes any frames from two clients: books balance, and each message has at most one reply."""
    world = RouterWorld(max_pending=8, max_message_bytes=4096)
    peer = world.join()
    sent = 0
    for number, message in enumerate(split(data, separator=b"\xc1\xc1")[:20]):
        world.message(split(message), client=b"client-%d" % (number % 2))
        sent += 1
        assert sum(map(len, world.replies.values())) <= sent
        if number % 3 == 2:
            world.answer(peer)
    while world.tickets(peer):
        world.answer(peer)
    assert not world.core.ledger.open
    assert "message_failed" not in world.events
    stats = world.core.stats(0.0)
    assert stats["accepted_total"] == sum(stats["replied_total"].values())


def seeds() -> list[bytes]:
    """Messages that are right, to begin from: coverage alone does not find its way into msgpack."""
    full = {
        "v": 1, "type": "infer", "id": "a", "model": "echo", "version": "1", "timeout_ms": 100, "priority": 9, "many": False, "retry": True,
        "key": "k", "trace": "t",
    }  # fmt: skip
    headers = [msgpack.packb({"v": 1, key: value}) for key, value in full.items()] + [msgpack.packb(full)]
    headers += [msgpack.packb({"v": 1, "id": b"a", "type": kind}) for kind in wire.TYPES]
    tensor = {"dtype": "float32", "shape": [1, 2], "data": 0}
    bodies = [msgpack.packb(value) for value in (1, [1, [2]], {"x": {"y": [None, 1.5, "s", b"b"]}}, list(range(20)))]
    bodies.append(b"\xc1".join([msgpack.packb({"t": tensor, "u": {**tensor, "data": bytes(8)}}), bytes(8)]))
    work = [(1, 0, 0, 1, 1.0, 5, [b"x"])]
    result = [(1, "ok", "", "", 1, 0, 0.0, 0.0, 0.0, 0.0, True, [b"x"])]
    links = [msgpack.packb(value) for value in (work, result, [1, 2], [0, 1, 1, "t", 8])]
    messages = [header + b"\xc1" + bodies[0] for header in headers]
    return [*headers, *bodies, *links, *messages, b"\xc1\xc1".join(messages)]


def split(data: bytes, *, separator: bytes = b"\xc1") -> list[bytes]:
    """Make frames of bytes; what separates them can stand in no msgpack outside of texts."""
    return data.split(separator)


def depth(value: object) -> int:
    """How deep lists and maps are nested in each other; a tensor is a map with a list."""
    inner: Sequence[Any] = ()
    if isinstance(value, list):
        inner = value
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, Tensor):
        return 1
    else:
        return 0
    return 1 + max(map(depth, inner), default=0)


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "header": header, "reply": reply, "rows": rows, "body": body, "link": workers_link, "core": core,
}  # fmt: skip
