"""The client passes on the trace that its caller is in, and imports nothing for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpupool.client.call import filled
from gpupool.client.trace_context import current_traceparent


def header(trace: str | None) -> str | None:
    found: str | None = filled({"trace": trace}, timeout=1.0, retries=0, hedge_after=None)["trace"]
    return found


def test_the_current_span_is_passed_on_unless_another_is_given() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    mine = f"00-{0xABC:032x}-{0xDEF:016x}-01"

    assert header(None) is None
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert (header(None), header("00-x"), header("")) == (mine, "00-x", None)


def test_an_api_that_cannot_be_used_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", SimpleNamespace())

    assert current_traceparent() is None


def test_the_client_never_imports_opentelemetry() -> None:
    code = (
        "import sys; from gpupool.client import Client; from gpupool.client.trace_context import current_traceparent as c; "
        "print(c(), [m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)

    assert done.stdout.strip() == "None []"
