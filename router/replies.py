"""The one reply of a message, and the one log record that goes with it.

Records name sizes and times, never content: the message of a model's error can quote the sample, so it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgpack

from gpupool.errors import ErrorCode
from gpupool.link import Result
from gpupool.spec import ModelSpec
from gpupool.wire import VERSION, RequestId

from .commands import Reply
from .latencies import Latencies
from .requests import Request

RETRYABLE: Final[dict[str, bool]] = {"ok": False, **{str(code): code.retryable for code in ErrorCode}}
_NOTHING: Final = Result(0, "")
_MASK: Final = (1 << 64) - 1
#: 2^64 by the golden ratio: multiples of it, modulo 2^64, fall evenly over the range whatever regular steps tickets come in.
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15


class Replies:
    """Makes replies; workers from slot `overflow_from` on are marked. One packer is kept: making one costs as much as packing a reply."""

    def __init__(self, models: Sequence[ModelSpec], overflow_from: int) -> None:
        self._overflow_from = overflow_from
        self._names = [(m.name, m.version) for m in models]
        self._pack = msgpack.Packer().pack
        self.latencies = Latencies(len(self._names))
        self._sampled_below = 1 << 64

    def sample(self, share: float) -> None:
        """Make records for this share (0 to 1) of the requests that end `ok`, and for all others. Which ones is decided by the ticket."""
        self._sampled_below = int(share * (1 << 64))

    def finished(
        self,
        request: Request,
        code: str,
        now: float,
        *,
        message: str = "",
        result: Result | None = None,
        retry_after_ms: int | None = None,
    ) -> Reply:
        """Answer an accepted request, from a worker's result or without one."""
        name, version = self._names[request.model]
        r = result or _NOTHING
        # Three decimals by integers: round() takes four times as long, six times a reply.
        pending_us = int(request.pending(now) * 1e6 + 0.5)
        total_us = int((now - request.arrived) * 1e6 + 0.5)
        queue_us = int(r.queue_s * 1e6 + 0.5)
        preprocess_us = int(r.preprocess_s * 1e6 + 0.5)
        forward_us = int(r.forward_s * 1e6 + 0.5)
        postprocess_us = int(r.postprocess_s * 1e6 + 0.5)
        beside = None if result is None else (queue_us, preprocess_us, forward_us, postprocess_us)
        self.latencies.note(request.model, pending_us, total_us, beside)
        pending, total, queue = pending_us / 1e3, total_us / 1e3, queue_us / 1e3
        preprocess, forward, postprocess = preprocess_us / 1e3, forward_us / 1e3, postprocess_us / 1e3
        header: dict[str, Any] = {
            "v": VERSION, "id": request.id, "code": code, "retryable": RETRYABLE[code], "model": name, "version": version,
            "attempts": request.attempts,
            "timings_ms": {
                "pending": pending, "queue": queue, "preprocess": preprocess, "forward": forward,
                "postprocess": postprocess, "total": total,
            },
        }  # fmt: skip
        slot = request.slot if request.slot >= 0 else None
        if slot is not None:
            header["worker"] = slot
            if slot >= self._overflow_from:
                header["overflow"] = True
        frames = [request.client, b""] if request.delimiter else [request.client]
        # Before the record is made: that is a quarter of what is done here (0.6 of 2.5 µs), and writing it costs more than all of it.
        # What was run again always has its line: there is something to explain.
        if code == "ok" and request.attempts < 2 and (request.ticket * _GOLDEN & _MASK) >= self._sampled_below:
            return Reply([*frames, self._pack(header), *(r.frames or (b"",))], {})
        record = {
            "request_id": text_of(request.id), "client": client_name(request.client), "ticket": request.ticket, "model": name,
            "worker": slot, "incarnation": request.incarnation, "code": code, "sends": request.sends, "attempts": request.attempts,
            "batch_size": r.batch_size, "input_bytes": request.size, "output_bytes": 0, "length": r.length, "pending_ms": pending, "queue_ms": queue,
            "preprocess_ms": preprocess, "forward_ms": forward, "postprocess_ms": postprocess, "total_ms": total,
        }  # fmt: skip
        if slot is not None and slot >= self._overflow_from:
            record["overflow"] = True
        if request.tenant.name:
            record["user"] = request.tenant.name
        if code == "ok":
            record["output_bytes"] = sum(map(len, r.frames))
            frames.append(self._pack(header))
            frames += r.frames or (b"",)
            return Reply(frames, record)
        header["message"] = message
        if retry_after_ms is not None:
            header["retry_after_ms"] = retry_after_ms
        if r.field:
            header["field"] = r.field
        if result is None:  # a worker's words may be its model's, whatever the code, and quote the sample
            record["message"] = message
        frames += (self._pack(header), b"")
        return Reply(frames, record)

    def refused(
        self,
        client: bytes,
        code: str,
        message: str,
        *,
        delimiter: bool,
        request_id: RequestId | None,
        field: str | None = None,
        retry_after_ms: int | None = None,
        input_bytes: int = 0,
        user: str = "",
    ) -> Reply:
        """Answer a message that was never queued."""
        optional = {"id": request_id, "field": field, "retry_after_ms": retry_after_ms}
        header: dict[str, Any] = {"v": VERSION, "code": code, "retryable": RETRYABLE[code], "message": message}
        header |= {name: value for name, value in optional.items() if value is not None}
        record = {
            "request_id": text_of(request_id), "client": client_name(client), "code": code, "attempts": 0, "batch_size": 0,
            "input_bytes": input_bytes, "output_bytes": 0, "message": message,
        }  # fmt: skip
        if user:
            record["user"] = user
        return Reply([*_envelope(client, delimiter=delimiter), self._pack(header), b""], record)

    def answered(self, client: bytes, *, delimiter: bool, request_id: RequestId | None, body: bytes = b"") -> list[bytes]:
        """Make the frames that answer a `ping` or an `info`."""
        header: dict[str, Any] = {"v": VERSION, "code": "ok", "retryable": False}
        if request_id is not None:
            header["id"] = request_id
        return [*_envelope(client, delimiter=delimiter), self._pack(header), body]


def client_name(client: bytes) -> str:
    """Name a connection in the log."""
    return client[-8:].hex()


def text_of(request_id: RequestId | None) -> str | None:
    """Name a request in the log and in a trace."""
    return request_id.hex() if isinstance(request_id, bytes) else request_id


def _envelope(client: bytes, *, delimiter: bool) -> list[bytes]:
    return [client, b""] if delimiter else [client]
