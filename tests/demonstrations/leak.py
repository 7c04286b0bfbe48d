"""A model that leaks on two workers: the alarm, and each renewed when its turn comes, without a lost request. The same without a leak: nothing.

The window is some seconds instead of an hour, and the leak as much faster.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from demonstrations.finding import Finding, below, equal, told
from gpupool.supervisor.leak import CELLS, WARM_UP_CELLS
from support.running import FAST, Load, RunningPool

WORKERS: Final = 2
_RATE: Final = 60.0
_KEEP_BYTES: Final = 100_000
_LIMIT: Final = 4 << 30  # bytes per hour: less than half of what leaks
#: What an alarm may take beyond its window and its warm-up: cells that the load did not come to, looks that came late.
_LATER: Final = 1.5


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Let a sound pool work for so long, then a leaking one until both workers have been renewed."""
    window_s = seconds / 3
    for name in ("sound", "leaking"):
        (folder / name).mkdir()
    with _pool(folder / "sound", 0, window_s) as pool:
        load = Load(pool.start(), rate=_RATE)
        load.wait_for(int(2 * window_s * _RATE), within=60 + 4 * window_s)
        sound = [*pool.records("memory_leak_suspected"), *pool.records("worker_recycled")]
        judged = [worker["leak"].get("host") for worker in pool.status()["workers"]]
        quiet = load.stop()
    with _pool(folder / "leaking", _KEEP_BYTES, window_s) as pool:
        load = Load(pool.start(), rate=_RATE)
        live: Counter[int] = Counter()

        def renewed(status: dict[str, Any]) -> bool:
            live[status["pool"]["workers_ready"]] += 1
            return all(w["incarnation"] > 1 and w["state"] == "ready" for w in status["workers"])

        pool.wait(renewed, within=120 + 6 * window_s)
        load.wait_for(int(_RATE))
        busy = load.stop()
        alarms, recycled = pool.records("memory_leak_suspected"), pool.records("worker_recycled")
        first = {worker: _at(record) for record in reversed(alarms) if (worker := record["worker"]) is not None}
        ready = {r["worker"]: _at(r) for r in reversed(pool.records("worker_ready"))}
        slowest = max(first[worker] - ready[worker] for worker in first)
        within = (CELLS + WARM_UP_CELLS) / CELLS * window_s
        slopes = [record["bytes_per_hour"] / (1 << 30) for record in alarms]
        return [
            equal("sound pool: alarms and renewals", len(sound), 0),
            equal("sound pool: it was judged", all(judged), True),
            equal("sound pool: answers", dict(quiet), {"ok": quiet.total()}),
            equal("leaking pool: workers suspected", sorted(first), list(range(WORKERS))),
            told("window and warm-up; alarms after", f"{within:.1f} s; {slowest:.1f} s at the latest"),
            below("the slowest alarm, of window and warm-up", slowest / within, _LATER, "", timed=True),
            told("slopes told, GiB per hour", f"{min(slopes):.1f} to {max(slopes):.1f}"),
            told("what leaked, GiB per hour and worker", f"{_RATE / WORKERS * _KEEP_BYTES * 3600 / (1 << 30):.1f}"),
            equal("leaking pool: answers", dict(busy), {"ok": busy.total()}),
            equal("two renewals at a time", _overlaps(pool, recycled), 0),
            equal("fewest workers ready at any look", min(live), WORKERS - 1),
            equal("ends of processes told as crashes", len(pool.records("worker_exited")), 0),
            told("requests; slowest", f"{busy.total()}; {1000 * max(load.latencies):.0f} ms"),
        ]


def _pool(folder: Path, keep_bytes: int, window_s: float) -> RunningPool:
    rules = f"leak_window_s = {window_s}\nleak_alarm_bytes_per_hour = {_LIMIT}\nrecycle_on_leak = true\n"
    options = f"seconds = 0.005, keep_bytes = {keep_bytes}"
    return RunningPool(folder, "leaky_model:Leaky", workers=WORKERS, options=options, config=FAST + rules)


def _overlaps(pool: RunningPool, recycled: Sequence[dict[str, Any]]) -> int:
    """Renewals that began before the one before was ready again."""
    ready = [(r["worker"], _at(r)) for r in pool.records("worker_ready")]
    spans = []
    for record in recycled:
        begun = _at(record)
        spans.append(
            (begun, min((at for worker, at in ready if worker == record["worker"] and at > begun), default=float("inf")))
        )
    spans.sort()
    return sum(later[0] < before[1] for before, later in itertools.pairwise(spans))


def _at(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["timestamp"]).timestamp()
