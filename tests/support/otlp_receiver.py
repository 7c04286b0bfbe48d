"""A collector for a test: takes OTLP over HTTP, decodes it by OpenTelemetry's own protocol definition, and keeps the spans."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Span:
    """One span as it came. Instants are epoch nanoseconds, ids hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    status: int
    status_message: str
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    resource: dict[str, Any] = field(default_factory=dict)


class OtlpReceiver:
    """Listens on a free port; answers each export with `status`. `headers` are those of the last export.

    Args:
        then: bytes that are the answer, in place of one with `status`.
        endless: bytes sent after it every `pause_s`, until the other side leaves.
    """

    def __init__(self, status: int = 200, then: bytes = b"", endless: bytes = b"", pause_s: float = 0.0) -> None:
        self.status = status
        self._closing = threading.Event()
        self.spans: list[Span] = []
        self.headers: dict[str, str] = {}
        self.raw = b""  # all that came, to look for what must not be in it
        self.exports = 0
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(
                    self.path,
                    {k.lower(): v for k, v in self.headers.items()},
                    self.rfile.read(int(self.headers["Content-Length"])),
                )
                if then or endless:
                    self.close_connection = True
                    with contextlib.suppress(OSError):
                        self.wfile.write(then)
                        while endless and not receiver._closing.is_set():
                            self.wfile.write(endless)
                            receiver._closing.wait(pause_s)
                    return
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def wait(self, enough: Callable[[list[Span]], bool], timeout_s: float = 20.0) -> list[Span]:
        """Wait until enough spans are there; returns all."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not enough(self.spans):
                left = until - time.monotonic()
                assert left > 0, f"only these came: {[(s.name, s.attributes) for s in self.spans]}"
                self._changed.wait(left)
            return list(self.spans)

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        message = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.exports += 1
            self.headers = headers
            self.raw += body
            if self.status == 200:
                for group in message.resource_spans:
                    resource = _plain(group.resource.attributes)
                    self.spans += [_span(span, resource) for scope in group.scope_spans for span in scope.spans]
            self._changed.notify_all()


def _span(span: Any, resource: dict[str, Any]) -> Span:
    links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
    return Span(
        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.kind, span.start_time_unix_nano,
        span.end_time_unix_nano, span.status.code, span.status.message, _plain(span.attributes), links, resource,
    )  # fmt: skip


def _plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
