"""A pool as large as one likes whose status and counts have everything that the metrics page can show: no process is started."""

from __future__ import annotations

import random
from typing import Any

from gpupool.batches import SIZES
from gpupool.board import Phase, SlotRecord
from gpupool.errors import ErrorCode
from gpupool.spec import BatchingSpec, ModelSpec
from gpupool.stages import BOUNDS_S, STAGES
from gpupool.supervisor import events as ev
from gpupool.supervisor.cards.reading import CLOCKS_EVENTS
from gpupool.supervisor.devices import Device
from gpupool.supervisor.metrics import Counts
from gpupool.supervisor.pool import Pool
from gpupool.supervisor.status import About, document
from gpupool.supervisor.tallies import Tallies
from gpupool.supervisor.workers import END_REASONS
from support.world import POLICY

NOW = 1000.0
LOG = {"losses": {"info": 3}, "forwarding": {"address": "127.0.0.1:24224", "up": True, "sent": 10, "dropped": 1, "waiting": 0}}
CLOSE_REASONS = ("full", "min", "window", "idle", "deadline", "alone")


def reports(models: int) -> dict[str, Any]:
    """What one worker has counted."""
    return {
        "closed": dict.fromkeys(CLOSE_REASONS, 100),
        "sizes": {f"model-{n}": {"counts": [5] * (len(SIZES) + 1), "samples": 1000} for n in range(models)},
        "prediction": {"batches": 90, "predicted_s": 1.25, "measured_s": 1.5},
        "oom": 2,
        "log": LOG,
    }


def books(models: int) -> dict[str, Any]:
    """What one router tells."""
    codes = dict.fromkeys(("ok", *map(str, ErrorCode)), 1_000_000)
    stages = {stage: {"counts": [1_000_000] * (len(BOUNDS_S) + 1), "us": 1 << 40} for stage in STAGES}
    totals = (
        "undeliverable_total", "late_results_total", "displaced_total", "overflowed_total", "unretried_total", "silenced_total",
        "handshakes_refused_total", "endless_total", "messages_dropped_total",
    )  # fmt: skip
    return {
        "replied_by_model": dict.fromkeys(("", *(f"model-{n}" for n in range(models))), codes),
        "latencies": {f"model-{n}": stages for n in range(models)},
        "redispatched_total": dict.fromkeys(END_REASONS, 7), "log": LOG, **dict.fromkeys(totals, 5),
        "connections": 3, "silent_connections": 0, "pressure": False, "poisoned": 1, "retry_budget": 0.5, "pending": 4,
    }  # fmt: skip


def full(workers: int, models: int, incarnations: int = 1) -> tuple[dict[str, Any], Counts]:
    """The status document and the counts of such a pool, of which each process is the so-manieth."""
    specs = [ModelSpec(f"model-{n}", batching=BatchingSpec()) for n in range(models)]
    pool = Pool(workers, POLICY, random.Random(1))
    pool.handle(ev.Started(), 0.0)
    for n, slot in enumerate(pool.slots):
        pool.handle(ev.WorkerSpawned(n, slot.incarnation, 100 + n), 1.0)
    record = SlotRecord(
        incarnation=1, pid=100, phase=Phase.IDLE, phase_since_ns=0, phase_deadline_ns=0, beat_ns=int(NOW * 1e9) - 10**7, progress=1,
        running=0, queued=3, batch_limit=32, service_ns=1_000_000, batches=9, samples=90, last_error=0, router_epoch=1,
        memory_bytes=1 << 30, window_ns=5_000_000,
    )  # fmt: skip
    uuids = [f"GPU-{n:08d}-aaaa-bbbb-cccc-000000000000" for n in range(workers)]
    about = About("p", 1, 0.0, 0.0, 1, [Device("gpu", uuid, "H200") for uuid in uuids], specs, None)
    card = {
        "health": "ok", "memory_used_bytes": 1 << 33, "memory_total_bytes": 1 << 37, "utilization": 0.5, "temperature_c": 60,
        "power_w": 400.0, "clocks_events": dict.fromkeys(CLOCKS_EVENTS.values(), False),
    }  # fmt: skip
    memory = dict.fromkeys(("budget_bytes", "used_bytes", "reserved_bytes", "pool_bytes", "pool_used_bytes"), 1 << 33)
    leak = {"rss": {"slope_bytes_per_hour": 5, "suspected": False}}
    told, routed = Tallies(), Tallies()
    counted = {
        key: value for key, value in books(models).items() if key in ("replied_by_model", "latencies", "log") or "_total" in key
    }
    for incarnation in range(1, incarnations + 1):
        for n in range(workers):
            told.tell(n, incarnation, reports(models))
        routed.tell(0, incarnation, counted)
    status = document(
        pool, about, books(models), 2, [record] * workers, [card] * workers,
        {n: {"memory": memory, "oom_total": 2} for n in range(workers)}, dict.fromkeys(range(workers), leak), NOW,
    )  # fmt: skip
    return status, Counts(
        ends={(n, "crash"): incarnations - 1 for n in range(workers)}, end_reasons=END_REASONS, xids={(uuid, 79): 1 for uuid in uuids},
        workers={n: told.total(n) for n in range(workers)}, router=routed.total(0), log=LOG, forward_up=True, scrape_s=0.005,
    )  # fmt: skip
