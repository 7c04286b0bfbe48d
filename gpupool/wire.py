"""The client protocol, version 1: message frames to request headers and back.

A message is `[header, body, buffer…]`, with one empty frame before it when the peer is a REQ socket. The router reads the
header only; bodies are opaque to it. Everything a peer can get wrong is a `WireError` with the reply's code and words.

Covers: frames and headers. Does not cover: samples and tensors inside a body (see samples).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from gpupool.errors import ErrorCode

VERSION: Final = 1
#: A header is a small flat map. 4 KiB leaves room for unknown keys of newer clients and bounds what a bomb can cost.
MAX_HEADER_BYTES: Final = 4096
#: Frames after the body. libzmq's own limits count messages, not frames (one message of 400,000 frames cost 700 MB).
MAX_BUFFERS: Final = 256
MAX_ID_BYTES: Final = 64
MAX_NAME_BYTES: Final = 128
MAX_KEY_BYTES: Final = 256
#: Above this a timeout is a client's mistake; a week also keeps deadlines inside exact floats.
MAX_TIMEOUT_MS: Final = 7 * 24 * 3600 * 1000
#: Samples in one `many` request.
MAX_ROWS: Final = 65536
DEFAULT_PRIORITY: Final = 5
MAX_PRIORITY: Final = 9
TYPES: Final = ("infer", "cancel", "ping", "info")
_TEXTS: Final = (("model", MAX_NAME_BYTES), ("version", MAX_NAME_BYTES), ("key", MAX_KEY_BYTES), ("trace", MAX_KEY_BYTES))

RequestId = str | bytes


class WireError(Exception):
    """The peer broke the protocol; carries what its one reply must say."""

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode = ErrorCode.BAD_REQUEST,
        field: str | None = None,
        request_id: RequestId | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.field = field
        self.request_id = request_id


@dataclass(slots=True)
class Header:
    """A checked request header. `id` is None when the client left it out: the router makes one.

    Not frozen: one is made for every request, and freezing would triple what that costs.
    """

    type: str = "infer"
    id: RequestId | None = None
    model: str | None = None
    version: str | None = None
    timeout_ms: int | None = None
    priority: int = DEFAULT_PRIORITY
    many: bool = False
    key: str | None = None
    retry: bool = True
    trace: str | None = None


def split_delimiter(frames: Sequence[bytes]) -> tuple[bool, Sequence[bytes]]:
    """Tell whether a REQ socket's empty delimiter leads, and return the frames without it.

    Only a frame that follows makes an empty one a delimiter: what is empty throughout is a malformed message of a DEALER, which
    could not read a reply with a delimiter.
    """
    if len(frames) > 1 and not frames[0] and frames[1]:
        return True, frames[1:]
    return False, frames


def parse_header(frame: bytes) -> Header:
    """Decode and check one header frame.

    Raises:
        WireError: `bad_request`, with the field at fault and the request's id where it could be read.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise WireError(f"header has {len(frame)} bytes, the limit is {MAX_HEADER_BYTES}")
    try:
        raw = msgpack.unpackb(frame, raw=False, strict_map_key=False)
    except Exception as e:  # msgpack raises a dozen unrelated types on bad bytes; all mean the same here
        raise WireError(f"header is not msgpack: {type(e).__name__}") from None
    if type(raw) is not dict:
        raise WireError(f"header must be a map, not {type(raw).__name__}")
    get = raw.get
    request_id = _request_id(get("id"))
    version = get("v")
    if type(version) is not int or version != VERSION:
        raise _refusal(raw, "v", f"protocol version {VERSION}", request_id)
    kind = "infer" if (found := get("type")) is None else found
    if type(kind) is not str or kind not in TYPES:
        raise _refusal(raw, "type", "one of " + ", ".join(TYPES), request_id)
    timeout_ms = get("timeout_ms")
    if timeout_ms is not None and (type(timeout_ms) is not int or not 0 < timeout_ms <= MAX_TIMEOUT_MS):
        raise _refusal(raw, "timeout_ms", f"an integer from 1 to {MAX_TIMEOUT_MS}", request_id)
    priority = DEFAULT_PRIORITY if (found := get("priority")) is None else found
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise _refusal(raw, "priority", f"an integer from 0 to {MAX_PRIORITY}", request_id)
    many = False if (found := get("many")) is None else found
    if type(many) is not bool:
        raise _refusal(raw, "many", "a boolean", request_id)
    retry = True if (found := get("retry")) is None else found
    if type(retry) is not bool:
        raise _refusal(raw, "retry", "a boolean", request_id)
    for field, limit in _TEXTS:
        text = get(field)
        if text is not None and (type(text) is not str or len(text) > limit):
            raise _refusal(raw, field, f"a string of at most {limit} characters", request_id)
    return Header(
        kind, request_id, get("model"), get("version"), timeout_ms, priority, many, get("key"), retry, get("trace")
    )  # fmt: skip


def _refusal(raw: dict[Any, Any], field: str, expected: str, request_id: RequestId | None) -> WireError:
    return WireError(f"{field}: expected {expected}, got {_show(raw.get(field))}", field=field, request_id=request_id)


def _request_id(value: Any) -> RequestId | None:
    if value is None:
        return None
    if type(value) is bytes and 0 < len(value) <= MAX_ID_BYTES:
        return value
    if type(value) is str and 0 < len(value) <= MAX_ID_BYTES and len(value.encode("utf-8", "surrogatepass")) <= MAX_ID_BYTES:
        return value
    raise WireError(f"id: expected a string or bytes of 1 to {MAX_ID_BYTES} bytes, got {_show(value)}", field="id")


def _show(value: Any) -> str:
    """Name a value without repeating what a hostile peer put into it."""
    if isinstance(value, (int, float, bool, type(None))) and len(text := repr(value)) <= 24:
        return text
    return type(value).__name__


def pack_request(header: dict[str, Any]) -> bytes:
    """Encode a client's request header; None values are left out. `v` is added."""
    packed: bytes = msgpack.packb({"v": VERSION, **{k: v for k, v in header.items() if v is not None}})
    return packed


def pack_reply(
    *,
    request_id: RequestId | None,
    code: str = "ok",
    message: str | None = None,
    retryable: bool = False,
    **fields: Any,
) -> bytes:
    """Encode a reply header; fields that are None are left out."""
    header: dict[str, Any] = {"v": VERSION, "code": code, "retryable": retryable}
    if request_id is not None:
        header["id"] = request_id
    if message:
        header["message"] = message
    header.update({name: value for name, value in fields.items() if value is not None})
    packed: bytes = msgpack.packb(header)
    return packed


def parse_reply(frame: bytes) -> dict[str, Any]:
    """Decode a reply header on the client's side.

    Raises:
        WireError: when it is no reply of this protocol version.
    """
    try:
        header = msgpack.unpackb(frame, raw=False, strict_map_key=False)
    except Exception as e:
        raise WireError(f"reply header is not msgpack: {type(e).__name__}") from None
    if type(header) is not dict or header.get("v") != VERSION or type(header.get("code")) is not str:
        raise WireError("reply header is not of protocol version 1")
    return header


def row_count(body: bytes) -> int:
    """Read from the first bytes of a `many` body how many samples it announces, without decoding them.

    Raises:
        WireError: `bad_request` when the body is not a list; `too_large` above MAX_ROWS.
    """
    first = body[0] if body else 0
    if first & 0xF0 == 0x90:
        rows = first & 0x0F
    elif first == 0xDC and len(body) >= 3:
        rows = int.from_bytes(body[1:3], "big")
    elif first == 0xDD and len(body) >= 5:
        rows = int.from_bytes(body[1:5], "big")
    else:
        raise WireError("many: the body must be a list of samples", field="many")
    if rows > MAX_ROWS:
        raise WireError(f"many: {rows} samples, the limit is {MAX_ROWS}", code=ErrorCode.TOO_LARGE, field="many")
    if rows > len(body):  # every sample takes a byte at least: a header that lies is refused before anyone counts on it
        raise WireError(f"many: announces {rows} samples in {len(body)} bytes", field="many")
    return rows
