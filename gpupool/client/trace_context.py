"""The trace that the caller is in, where its process uses OpenTelemetry; which is looked for, and never imported."""

from __future__ import annotations

import sys


def current_traceparent() -> str | None:
    """Return the W3C traceparent of the current span; None where there is none, or no OpenTelemetry in this process."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    try:
        context = api.get_current_span().get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}" if context.is_valid else None
    except Exception:  # half imported, or another version: a request must not fail for want of its trace
        return None
