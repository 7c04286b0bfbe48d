"""What a request must be to be let in: the checks that look at the message and the configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from gpupool import __version__
from gpupool.errors import ErrorCode
from gpupool.link import WorkFlag
from gpupool.spec import RouterSpec
from gpupool.wire import MAX_BUFFERS, MAX_ROWS, VERSION, Header, RequestId, WireError, row_count

from .requests import Request
from .tenants import Tenant


class Refused(WireError):
    """A request that is well-formed and not taken; carries when to try again."""

    def __init__(
        self,
        message: str,
        code: ErrorCode,
        request_id: RequestId | None,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message, code=code, field=field, request_id=request_id)
        self.retry_after_ms = retry_after_ms


class Intake:
    """Checks requests against the pool's models and limits, and numbers them."""

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec
        self.names = [m.name for m in spec.models]
        self._models = {name: i for i, name in enumerate(self.names)}
        self._sequence = 0
        self.default_timeout_s = spec.default_timeout_ms / 1e3

    def model_name(self, header: Header) -> str:
        """The model that a header means; "" for none of ours, so that a client's words never become a label."""
        if header.model is None:
            return self._spec.models[0].name
        return header.model if header.model in self._models else ""

    def admit(
        self, client: bytes, tenant: Tenant, header: Header, frames: Sequence[bytes], now: float, *, delimiter: bool
    ) -> Request:
        """Make the request of an `infer` message; `frames` are body and buffers.

        Raises:
            WireError: when it cannot be one, with the reply's code.
        """
        request_id, flags, rows, model = header.id, 0, 1, 0
        if not frames:
            raise Refused("infer needs a body frame after the header", ErrorCode.BAD_REQUEST, request_id)
        if len(frames) > MAX_BUFFERS + 1:
            raise Refused(f"more than {MAX_BUFFERS} buffer frames", ErrorCode.BAD_REQUEST, request_id)
        size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
        if size > self._spec.max_message_bytes:
            limit = f"message has {size} bytes, the limit is {self._spec.max_message_bytes}"
            raise Refused(limit, ErrorCode.TOO_LARGE, request_id)
        if header.model is not None:
            if header.model not in self._models:
                raise Refused("no such model in this pool", ErrorCode.UNKNOWN_MODEL, request_id, field="model")
            model = self._models[header.model]
        if header.version is not None and header.version != self._spec.models[model].version:
            current = f"{self._spec.models[model].name} is at version {self._spec.models[model].version}"
            raise Refused(current, ErrorCode.VERSION_MISMATCH, request_id, field="version")
        if header.many:
            flags = int(WorkFlag.MANY)
            try:
                rows = row_count(frames[0])
            except WireError as e:
                e.request_id = request_id
                raise
        self._sequence += 1
        patient = header.timeout_ms is None
        timeout_s = self.default_timeout_s if header.timeout_ms is None else header.timeout_ms / 1e3
        priority = min(header.priority, tenant.max_priority)
        return Request(
            client, tenant, self.new_id() if request_id is None else request_id, self._sequence, now, now + timeout_s, frames, size,
            delimiter=delimiter, model=model, flags=flags, rows=rows, priority=priority, retry=header.retry, patient=patient,
        )  # fmt: skip

    def new_id(self) -> str:
        """Make an id for a request that came without: unique in this pool's life, so in its connection's."""
        return f"{self._spec.epoch & 0xFFFF:04x}{self._sequence:012x}"

    def info(self) -> bytes:
        """Make the body that answers `info`."""
        limits = {
            "max_message_bytes": self._spec.max_message_bytes, "max_buffers": MAX_BUFFERS, "max_rows": MAX_ROWS,
            "default_timeout_ms": int(self.default_timeout_s * 1e3), "max_attempts": self._spec.max_attempts,
        }  # fmt: skip
        models: list[dict[str, Any]] = [
            {"name": m.name, "versions": [m.version], "current": m.version, "limits": {"max_batch": m.batching.max_batch}}
            for m in self._spec.models
        ]
        body: bytes = msgpack.packb(
            {"pool": self._spec.pool, "version": __version__, "protocols": [VERSION], "limits": limits, "models": models}
        )
        return body
