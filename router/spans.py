"""Spans of traced requests, as OpenTelemetry has them: built after the fact from what was noted, and exported by its own exporter.

A request is one server span with a child for each stage; a batch is a span of its own, linked to the requests in it. The only module
that imports OpenTelemetry, and imported only where traces are exported. Nothing of a body, a key or an error's words is in any span.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from gpupool import __version__
from gpupool.errors import ErrorCode
from gpupool.spec import TraceSpec
from gpupool.trace_headers import read_headers

from .collector_http import Deadline, open_session
from .tracing import Attempt, Finished, waiting_times

_SCOPE: Final = InstrumentationScope("gpupool", __version__)
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
#: Errors that are the client's: by the conventions a server's span is not at fault for them.
_CLIENTS: Final = frozenset({
    ErrorCode.BAD_REQUEST, ErrorCode.INVALID_INPUT, ErrorCode.TOO_LARGE, ErrorCode.UNKNOWN_MODEL, ErrorCode.VERSION_MISMATCH,
    ErrorCode.CANCELLED,
})  # fmt: skip

Value = str | int | float


def open_exporter(spec: TraceSpec, timeout_s: float) -> Callable[[Sequence[ReadableSpan]], bool]:
    """Make what sends spans to the collector, within `timeout_s`, and says whether it took them.

    Raises:
        HeadersError: when the file of headers cannot be read.
    """
    headers = read_headers(spec.headers_file) if spec.headers_file else None
    deadline = Deadline()
    session = open_session(deadline)
    exporter = OTLPSpanExporter(endpoint=spec.endpoint, headers=headers, timeout=timeout_s, session=session)
    # It tells of each failure by several lines; we count them, and tell once in a while.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def export(spans: Sequence[ReadableSpan]) -> bool:
        deadline.begin(timeout_s)
        return exporter.export(spans) is SpanExportResult.SUCCESS

    return export


class SpanBuilder:
    """Makes spans. Ids of root spans were given by the sampler; those of children and of batches come from here."""

    def __init__(self, spec: TraceSpec, pool: str) -> None:
        self._devices = spec.devices
        self._resource = Resource.create(
            {"service.name": spec.service_name, "service.version": __version__, "gpupool.pool": pool}
        )
        self._rng = random.Random()
        self._offset_s = 0.0

    def spans(self, finished: Sequence[Finished], offset_s: float) -> list[ReadableSpan]:
        """Return the spans of requests and of their batches; `offset_s`: from monotonic to epoch seconds."""
        self._offset_s = offset_s
        batches: dict[tuple[int, int, float], list[Finished]] = {}
        spans: list[ReadableSpan] = []
        for request in finished:
            spans += self._request(request)
            if (marks := request.marks) is not None:
                batches.setdefault((request.slot, marks.batch, marks.batch_at), []).append(request)
        spans += [self._batch(requests) for requests in batches.values()]
        return spans

    def _request(self, r: Finished) -> Iterator[ReadableSpan]:
        trace = r.trace
        context = SpanContext(trace.trace_id, trace.span_id, is_remote=False, trace_flags=_SAMPLED)
        caller = SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=_SAMPLED) if trace.parent_id else None
        attributes: dict[str, Value] = {
            "gpupool.model": r.model, "gpupool.code": r.code, "gpupool.attempts": r.attempts, "gpupool.rows": r.rows,
            "gpupool.priority": r.priority, "gpupool.input_bytes": r.input_bytes,
        }  # fmt: skip
        if r.version:
            attributes["gpupool.version"] = r.version
        if r.slot >= 0:
            attributes |= self._worker(r.slot) | {"gpupool.batch_size": r.batch_size}
        if r.request_id.isprintable():  # the client's own words, of 64 bytes at most: no control characters into a backend
            attributes["gpupool.request_id"] = r.request_id
        if r.code == "ok":
            status = Status(StatusCode.OK)
        else:
            # The code alone: the message of an error can quote the sample.
            status = Status(StatusCode.UNSET) if r.code in _CLIENTS else Status(StatusCode.ERROR, r.code)
        # The router's instants are those of its turns; an answer may have come in while one was under way.
        ended = r.ended if r.marks is None else max(r.ended, r.marks.ended)
        yield self._span("gpupool.request", context, caller, r.arrived, ended, attributes, kind=SpanKind.SERVER, status=status)
        for start, end in waiting_times(r.arrived, trace.attempts, r.sent, r.ended):
            yield self._child("pending", context, start, end)
        for attempt in trace.attempts:
            yield self._attempt(context, attempt)
        if r.marks is not None:
            yield from self._stages(r, context)
        elif r.sent:  # its worker died with it, or answered without running it, or it was answered early
            yield self._attempt(context, Attempt(r.slot, r.sent, r.ended, r.code))

    def _stages(self, r: Finished, context: SpanContext) -> Iterator[ReadableSpan]:
        """Yield what happened in the worker. `queue` stands before preprocess and after it."""
        m = r.marks
        assert m is not None
        queued_at = m.arrived
        if m.preprocess_at:
            yield self._child("queue", context, m.arrived, m.preprocess_at)
            queued_at = min(m.preprocess_at + r.preprocess_s, m.forward_at)
            yield self._child("preprocess", context, m.preprocess_at, queued_at)
        yield self._child("queue", context, queued_at, m.forward_at)
        batch: dict[str, Value] = {"gpupool.batch": m.batch, "gpupool.forward_s": r.forward_s}
        yield self._child("forward", context, m.forward_at, m.forward_end, batch)
        yield self._child("postprocess", context, m.postprocess_at, m.ended)

    def _attempt(self, parent: SpanContext, attempt: Attempt) -> ReadableSpan:
        attributes = self._worker(attempt.slot) | {"gpupool.reason": attempt.reason}
        return self._child("attempt", parent, attempt.sent, attempt.ended, attributes)

    def _batch(self, requests: Sequence[Finished]) -> ReadableSpan:
        first = requests[0]
        m = first.marks
        assert m is not None
        attributes: dict[str, Value] = {
            "gpupool.model": first.model, "gpupool.version": first.version, **self._worker(first.slot), "gpupool.batch": m.batch,
            "gpupool.batch_size": m.rows, "gpupool.bucket": m.bucket, "gpupool.close_reason": m.reason,
            "gpupool.traced_requests": len(requests),
        }  # fmt: skip
        context = SpanContext(self._rng.getrandbits(128) or 1, self._new_id(), is_remote=False, trace_flags=_SAMPLED)
        links = [Link(SpanContext(r.trace.trace_id, r.trace.span_id, is_remote=False, trace_flags=_SAMPLED)) for r in requests]
        return self._span("gpupool.batch", context, None, m.batch_at, m.forward_end, attributes, links=links)

    def _worker(self, slot: int) -> dict[str, Value]:
        if slot >= len(self._devices):
            return {"gpupool.worker": slot}
        return {"gpupool.worker": slot, "gpupool.device": self._devices[slot]}

    def _child(
        self, name: str, parent: SpanContext, start: float, end: float, attributes: Mapping[str, Value] | None = None
    ) -> ReadableSpan:
        context = SpanContext(parent.trace_id, self._new_id(), is_remote=False, trace_flags=_SAMPLED)
        return self._span(name, context, parent, start, end, attributes or {})

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start: float,
        end: float,
        attributes: Mapping[str, Value],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        status: Status | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name, context, parent, self._resource, attributes, (), links, kind, status=status or Status(), start_time=self._wall(start),
            end_time=self._wall(max(start, end)), instrumentation_scope=_SCOPE,
        )  # fmt: skip

    def _wall(self, instant: float) -> int:
        return int((instant + self._offset_s) * 1e9)

    def _new_id(self) -> int:
        return self._rng.getrandbits(64) or 1
