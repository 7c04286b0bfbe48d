"""Two clients, one with hundreds of requests open, one with one at a time: what the second one notices of the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from demonstrations import load
from demonstrations.finding import Finding, below, equal, told
from demonstrations.load import Job
from support.running import RunningPool

_FLOOD: Final = 300
#: A batch takes a fixed time in the first variant, and longer the fuller it is in the second.
VARIANTS: Final = {"20 ms a batch": "fixed_s = 0.02", "5 ms + 2 ms a sample": "fixed_s = 0.005, each_s = 0.002"}
CONFIG: Final = "[batching]\nmax_batch = 8\nmin_batch = 8\nadaptive = false\nwindow_ms = 0.0\nidle_window_ms = 0.0\n"


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Measure both variants."""
    findings: list[Finding] = []
    for number, (name, options) in enumerate(VARIANTS.items()):
        home = folder / str(number)
        home.mkdir()
        with RunningPool(home, "paced_model:Paced", workers=1, options=options, config=CONFIG) as pool:
            pool.start()
            findings += _variant(pool, name, seconds / 2)
    return findings


def _variant(pool: RunningPool, name: str, seconds: float) -> Sequence[Finding]:
    one = Job(load.endpoint(pool), seconds / 2, open=1)
    alone = load.run(one)
    flood = load.start(Job(load.endpoint(pool), seconds / 2 + 3.0, open=_FLOOD))
    pool.wait(lambda s: s["router"]["pending"] > _FLOOD / 2)
    beside = load.run(one)
    pool.wait(lambda s: s["router"]["pending"] > _FLOOD / 2)  # it was flooded to the end
    flooded = load.finish(flood)
    quiet, busy = (1000 * load.percentile(seen.latencies.get("ok", []), 0.95) for seen in (alone, beside))
    batch = median(flooded.forwards_ms)
    return [
        told(f"{name}: requests of the quiet client, alone and beside the flood", f"{alone.sent} and {beside.sent}"),
        equal(f"{name}: its answers", dict(alone.codes + beside.codes), {"ok": alone.sent + beside.sent}),
        told(f"{name}: its p95 alone; a batch", f"{quiet:.1f} ms; {batch:.1f} ms"),
        below(f"{name}: its p95 beside the flood", busy, 2 * quiet + batch, "ms", timed=True),
        told(f"{name}: the flooding client", f"{flooded.ok_per_s(1.0, seconds / 2):.0f} ok/s, {dict(flooded.codes)}"),
    ]
