"""The lines that `gpupool top` shows, made to fit 80 columns: the pool, the heading, a worker, an event. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from gpupool.visible import visible

from .rates import Head, Row

#: Heading and width of each column; with the spaces between they make 78, beside a scroll bar of 2.
_COLUMNS: Final = (
    ("#", 2), ("state", 8), ("card", 6), ("health", 6), ("util", 4), ("mem", 5), ("°C", 3), ("wait", 4), ("run", 3),
    ("batch", 5), ("rows/s", 6), ("ms/row", 6), ("rst", 3), ("beat", 4),
)  # fmt: skip
_TEXT: Final = frozenset({"state", "card", "health"})
#: Fields of an event that its line shows elsewhere, or that say nothing to a person in a hurry.
_SHOWN: Final = frozenset({"time", "timestamp", "level", "event", "worker", "component", "pid", "n", "device", "incarnation"})
_UNKNOWN: Final = "-"


def pool_lines(head: Head) -> list[str]:
    """Two lines: how the pool is, and what goes through it."""
    state = f"{head.state}{', degraded' if head.degraded else ''}"
    errors = "-"
    if head.errors_per_s is not None:
        errors = ", ".join(f"{code} {number(rate)}" for code, rate in head.errors_per_s.items()) or "none"
    lines = [
        f"{head.name}: {state}; {head.ready}/{head.configured} workers ready; pending {head.pending}, in flight {head.in_flight}",
        f"ok/s {number(head.ok_per_s)}; errors/s {errors}; p50 {number(head.p50_ms)} ms, p99 {number(head.p99_ms)} ms",
    ]
    return [visible(line) for line in lines]


def heading() -> str:
    """Name the columns."""
    return _joined([name for name, _ in _COLUMNS])


def worker_line(row: Row) -> str:
    """Show one worker; what is cut off ends in an ellipsis."""
    return _joined([
        str(row.worker), "late" if row.late and row.state == "ready" else row.state, row.card.removeprefix("GPU-"), row.health,
        _UNKNOWN if row.utilization is None else f"{row.utilization:.0%}", size(row.memory_bytes), number(row.temperature_c),
        str(row.queue), str(row.running), number(row.batch), number(row.rows_per_s), number(row.sample_ms), str(row.restarts),
        _seconds(row.beat_ms),
    ])  # fmt: skip


def event_line(event: Mapping[str, Any]) -> str:
    """Show one event: when, how grave, whose, what, and its other fields."""
    time = event.get("time")
    at = datetime.fromtimestamp(time).astimezone().strftime("%H:%M:%S") if isinstance(time, int | float) else "--:--:--"
    whose = f" worker {event['worker']}" if event.get("worker") is not None else ""
    level = str(event.get("level", ""))
    grave = f" {level.upper()}" if level not in ("", "info", "debug") else ""
    fields = " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for key, value in event.items() if key not in _SHOWN and value is not None
    )  # fmt: skip
    return visible(f"{at}{grave}{whose} {event.get('event', '?')} {fields}".rstrip().replace("\n", " "))


def number(value: float | None) -> str:
    """Show a figure in at most six characters."""
    if value is None:
        return _UNKNOWN
    if value >= 99_999.5:
        return f"{value / 1000:.0f}k" if value < 9_999_500 else f"{value / 1e6:.0f}M"
    if value >= 99.95 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(value: int | None) -> str:
    """Show bytes in at most five characters."""
    if value is None:
        return _UNKNOWN
    mebibytes = value / 2**20
    return (
        f"{mebibytes:.0f}M"
        if mebibytes < 999.5
        else f"{mebibytes / 1024:.1f}G"
        if mebibytes < 99.95 * 1024
        else f"{mebibytes / 1024:.0f}G"
    )


def _seconds(milliseconds: float | None) -> str:
    if milliseconds is None:
        return _UNKNOWN
    seconds = milliseconds / 1000
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{min(seconds, 999):.0f}s"


def _joined(cells: list[str]) -> str:
    parts = []
    for (name, width), cell in zip(_COLUMNS, map(visible, cells), strict=True):
        fitting = cell if len(cell) <= width else f"{cell[: width - 1]}…"
        parts.append(f"{fitting:<{width}}" if name in _TEXT else f"{fitting:>{width}}")
    return " ".join(parts)
