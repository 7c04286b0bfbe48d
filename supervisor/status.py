"""The status document: what the pool, the router's books and the board say, in the shape that `gpupool status --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpupool import __version__
from gpupool.board import SlotRecord
from gpupool.spec import ModelSpec
from gpupool.stages import BOUNDS_S

from .devices import Device
from .pool import Pool
from .slot import Slot


@dataclass(frozen=True, slots=True)
class About:
    """Facts about this run that no event changes, or only a reload."""

    name: str
    pid: int
    started_at: float  # wall clock, for people
    started_mono: float
    generation: int
    devices: Sequence[Device]
    models: Sequence[ModelSpec]
    last_reload_error: str | None
    log_file: str | None = None  # where the log goes, if that is a file
    log_unit: str | None = None  # whose log the host's journal has, if it goes there


def document(
    pool: Pool,
    about: About,
    books: Mapping[str, Any],
    router_pid: int | None,
    records: Sequence[SlotRecord],
    cards: Sequence[Mapping[str, Any]],
    reports: Mapping[int, Mapping[str, Any]],
    leaks: Mapping[int, Mapping[str, Any]],
    now: float,
) -> dict[str, Any]:
    """Build the document; `now` is monotonic.

    `reports` is what workers last told of themselves, `leaks` how their memory has grown (see leak_watch), both by slot. `books` is the router's last answer to `stats`, possibly empty; `cards` what is known of each slot's card (health, needs,
    memory …), empty for a CPU.
    """
    held = {int(k): v for k, v in books.get("workers", {}).items()}
    ready, overflow = pool.ready_count, [s for s in pool.slots if s.overflow]
    return {
        "schema": 1,
        "pool": {
            "name": about.name, "state": pool.state, "ready": pool.ready, "degraded": pool.degraded, "version": __version__,
            "pid": about.pid, "started_at": iso(about.started_at), "uptime_s": round(now - about.started_mono, 3),
            "config_generation": about.generation, "workers_configured": len(pool.counted), "workers_ready": ready,
            "overflow_configured": len(overflow), "overflow_ready": sum(s.works for s in overflow),
            "batch_factor": pool.factors.batch, "window_factor": pool.factors.window,
            "degrade_level": pool.factors.level,
            "last_reload_error": about.last_reload_error, "log_file": about.log_file, "log_unit": about.log_unit,
        },
        "router": {
            "state": ("late" if pool.router.late else "ready") if pool.router.up else "starting", "pid": router_pid, "restarts": max(0, pool.router.epoch - 1),
            "bind": list(pool.router.bind),
            **{key: books.get(key, 0) for key in ("pending", "in_flight", "accepted_total")},
            "replied_total": books.get("replied_total", {}),
            **{key: value for key, value in books.items() if key not in _ROUTER_OWN},
            "latency": {
                model: {"total": {"bounds_ms": _BOUNDS_MS, "counts": of["total"]["counts"]}}
                for model, of in books.get("latencies", {}).items()
            },
        },
        "workers": [
            _worker(slot, about, records[slot.number], cards[slot.number], reports.get(slot.number, {}), held.get(slot.number, 0), now)
            | {"leak": leaks.get(slot.number, {})}
            for slot in pool.slots
        ],
        "models": [{"name": m.name, "current": m.version, "versions": [m.version]} for m in about.models],
    }  # fmt: skip


_BOUNDS_MS = [1e3 * bound for bound in BOUNDS_S]

#: Keys of the router's books that stand elsewhere in the document, are for the metrics alone, or are the channel's.
_ROUTER_OWN = frozenset(
    {"t", "n", "pending", "in_flight", "accepted_total", "replied_total", "workers", "bind", "state", "latencies"}
)


#: Parts of a worker's report that stand elsewhere in its entry, or are the channel's.
_REPORT_OWN = frozenset({"t", "memory"})


def _worker(
    slot: Slot,
    about: About,
    record: SlotRecord,
    card: Mapping[str, Any],
    report: Mapping[str, Any],
    in_flight: int,
    now: float,
) -> dict[str, Any]:
    device = about.devices[slot.number]
    mine = record.incarnation == slot.incarnation and slot.alive
    beat_age_ms = round((now - record.beat_ns / 1e9) * 1000, 1) if mine and record.beat_ns else None
    cap = max(m.batching.max_batch for m in about.models)
    return {
        "worker": slot.number, "overflow": slot.overflow, "state": slot.state, "pid": slot.pid, "incarnation": slot.incarnation, "restarts": slot.restarts,
        "last_exit": slot.last_exit,
        "device": {"kind": device.kind, "id": device.id, "name": device.name, "health": "ok", **card},
        "heartbeat_age_ms": beat_age_ms,
        "phase": record.phase.name.lower() if mine else None,
        "held": slot.held, "late": slot.late, "reason": slot.reason or None,
        "queue_length": record.queued if mine else 0, "running": record.running if mine else 0, "in_flight": in_flight,
        "batch_cap": cap, "batch_limit": record.batch_limit if mine else 0,
        "window_ms": round(record.window_ns / 1e6, 3) if mine else 0.0,
        "batches_total": record.batches if mine else 0, "samples_total": record.samples if mine else 0,
        "service_ms": round(record.service_ns / 1e6, 3) if mine else None,
        "memory": ({"rss_bytes": record.memory_bytes} if mine and record.memory_bytes else {}) | report.get("memory", {}),
        **{part: value for part, value in report.items() if part not in _REPORT_OWN},
        "models": slot.info.get("models", []) if slot.alive else [],
    }  # fmt: skip


def summary(pool: Pool, pending: int) -> str:
    """One line for systemd and for people in a hurry."""
    ready, configured = pool.ready_count, len(pool.counted)
    others: dict[str, int] = {}
    for slot in pool.counted:
        if not slot.works:
            word = "late" if slot.late else str(slot.state)
            others[word] = others.get(word, 0) + 1
    parts = [f"{ready}/{configured} workers ready", *(f"{n} {state}" for state, n in sorted(others.items()))]
    if extra := len(pool.slots) - configured:
        parts.append(f"{sum(s.works for s in pool.slots) - ready}/{extra} for overflow")
    if pool.factors.batch != 1.0:
        parts.append(f"batch limit x{pool.factors.batch:g}")
    return f"{pool.state}: {', '.join(parts)}; pending {pending}"


def iso(wall: float) -> str:
    """ISO 8601 in UTC."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")
