"""What a caller gets back, and how it is read from the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpupool.errors import GpuPoolError, Internal
from gpupool.samples import SampleError, unpack_body


@dataclass(frozen=True, slots=True)
class Reply:
    """A request's good end.

    `attempts` counts executions in the pool; `overflow` tells that an extra CPU worker ran it; `fallback` tells that the result is a fallback, not the model's own answer;
    `timings_ms` has the stages pending, queue, preprocess, forward, postprocess and total.
    """

    id: str
    result: Any
    model: str = ""
    version: str = ""
    worker: int | None = None
    attempts: int = 1
    fallback: bool = False
    timings_ms: dict[str, float] = field(default_factory=dict)
    code: str = "ok"
    overflow: bool = False


def read_reply(request_id: str, header: dict[str, Any], message: Sequence[bytes]) -> Reply | GpuPoolError:
    """Make the Reply of an `ok` message; an error where its body cannot be read."""
    try:
        result = unpack_body(message[1], message[2:]) if len(message) > 1 and message[1] else None
    except SampleError as e:
        return Internal(f"the pool's reply cannot be read: {e}", retryable=False)
    return Reply(
        id=request_id,
        result=result,
        model=header.get("model", ""),
        version=header.get("version", ""),
        worker=header.get("worker"),
        attempts=header.get("attempts", 1),
        overflow=header.get("overflow", False),
        fallback=header.get("fallback", False),
        timings_ms=header.get("timings_ms") or {},
    )
