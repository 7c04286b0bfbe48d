"""What a pool is at right now, worked out from its status document and an earlier one: rates, quantiles, a row for each worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_MEDIAN: Final = 0.5
_TAIL: Final = 0.99

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """The pool as a whole. Rates are for a second; None: not known."""

    name: str
    state: str
    degraded: bool
    ready: int
    configured: int
    pending: int
    in_flight: int
    ok_per_s: float | None
    errors_per_s: Mapping[str, float] | None  # by code
    p50_ms: float | None  # of the replies between the two documents, all models
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One worker. Figures of its card are None for a CPU; what is of late is None where nothing ran."""

    worker: int
    state: str
    card: str
    health: str
    utilization: float | None  # 0 to 1
    memory_bytes: int | None  # used on the card, or resident on the host
    temperature_c: float | None
    queue: int
    running: int
    batch: float | None  # samples in a batch of late
    rows_per_s: float | None
    sample_ms: float | None
    restarts: int
    beat_ms: float | None
    late: bool


def head(now: Document, before: Document | None) -> Head:
    """Sum up the pool; `before` is an earlier document of it."""
    pool, router = now["pool"], now.get("router") or {}
    seconds = _seconds(now, before)
    replied = None
    if before is not None and seconds is not None and _same(router, before.get("router") or {}, "pid", "restarts"):
        replied = _difference(router.get("replied_total") or {}, (before.get("router") or {}).get("replied_total") or {})
    latencies = _latencies(router, (before or {}).get("router") or {}) if replied is not None else None
    return Head(
        name=str(pool.get("name")), state=str(pool.get("state")), degraded=bool(pool.get("degraded")), ready=_int(pool.get("workers_ready")),
        configured=_int(pool.get("workers_configured")), pending=_int(router.get("pending")), in_flight=_int(router.get("in_flight")),
        ok_per_s=None if replied is None or seconds is None else replied.get("ok", 0) / seconds,
        errors_per_s=None if replied is None or seconds is None else {
            code: count / seconds for code, count in sorted(replied.items()) if code != "ok" and count
        },
        p50_ms=None if latencies is None else quantile(*latencies, _MEDIAN),
        p99_ms=None if latencies is None else quantile(*latencies, _TAIL),
    )  # fmt: skip


def rows(now: Document, before: Document | None) -> list[Row]:
    """Make a row for each worker, in the pool's order."""
    seconds = _seconds(now, before)
    earlier = {} if before is None else {worker["worker"]: worker for worker in before["workers"]}
    return [_row(worker, earlier.get(worker["worker"]), seconds) for worker in now["workers"]]


def quantile(bounds_ms: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimate a quantile in milliseconds from a histogram, evenly within its cell; beyond the last bound that bound. None: it is empty."""
    wanted, passed = share * sum(counts), 0.0
    if not wanted:
        return None
    low = 0.0
    for bound, count in zip(bounds_ms, counts, strict=False):
        if count and passed + count >= wanted:
            return low + (bound - low) * (wanted - passed) / count
        passed, low = passed + count, bound
    return low


def _row(worker: Mapping[str, Any], earlier: Mapping[str, Any] | None, seconds: float | None) -> Row:
    device = worker.get("device") or {}
    batches = samples = None
    if earlier is not None and seconds is not None and _same(worker, earlier, "incarnation", "pid"):
        batches, samples = (_int(worker.get(key)) - _int(earlier.get(key)) for key in ("batches_total", "samples_total"))
    memory = device.get("memory_used_bytes")
    return Row(
        worker=worker["worker"], state=str(worker["state"]), card=str(device.get("id", "")), health=str(device.get("health", "")),
        utilization=device.get("utilization"), memory_bytes=memory if memory is not None else (worker.get("memory") or {}).get("rss_bytes"),
        temperature_c=device.get("temperature_c"), queue=_int(worker.get("queue_length")), running=_int(worker.get("running")),
        batch=samples / batches if batches and samples is not None else None,
        rows_per_s=None if samples is None or seconds is None else samples / seconds,
        sample_ms=worker.get("service_ms") or None, restarts=_int(worker.get("restarts")), beat_ms=worker.get("heartbeat_age_ms"),
        late=bool(worker.get("late")),
    )  # fmt: skip


def _seconds(now: Document, before: Document | None) -> float | None:
    """Seconds between two documents of one run of the pool, by its own clock."""
    if before is None or not _same(now["pool"], before["pool"], "pid", "started_at"):
        return None
    passed = now["pool"].get("uptime_s", 0.0) - before["pool"].get("uptime_s", 0.0)
    return passed if passed > 0 else None


def _latencies(router: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[list[float], list[int]] | None:
    """Sum the models' histograms of whole requests, less what was in them before. None: the pool tells none."""
    bounds: list[float] = []
    counts: list[int] = []
    for model, stages in (router.get("latency") or {}).items():
        total = stages.get("total") or {}
        earlier = (((before.get("latency") or {}).get(model) or {}).get("total") or {}).get("counts") or []
        if not bounds:
            bounds, counts = list(total.get("bounds_ms", ())), [0] * len(total.get("counts", ()))
        for cell, count in enumerate(total.get("counts", ())[: len(counts)]):
            counts[cell] += count - (earlier[cell] if cell < len(earlier) else 0)
    return (bounds, counts) if bounds else None


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {key: count - before.get(key, 0) for key, count in now.items()}


def _same(one: Mapping[str, Any], other: Mapping[str, Any], *keys: str) -> bool:
    """Whether both tell of the same process: counters of another begin anew."""
    return all(one.get(key) == other.get(key) for key in keys)


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0
