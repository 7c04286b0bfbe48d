"""`p99_ms` finds the largest batch that keeps a latency objective: more throughput than small batches, and in time, unlike large ones.

One worker, a forward of 8 + n ms, an objective of 60 ms in the worker, which under load are two batches: with 1 ms between two of them about
20 samples keep it. Few requests first, which say nothing of the limit; then a flood, under which it rises until it is cut; then the
settled phase, which is judged; then the same flood without tuning, at `max_batch` and at `min_batch`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from demonstrations import load
from demonstrations.finding import Finding, above, below, equal, told
from demonstrations.load import Job, Seen
from support.running import RunningPool

FIXED_S: Final = 0.008
EACH_S: Final = 0.001
MOST, LEAST = 32, 4
OBJECTIVE_MS: Final = 60.0
_OPEN: Final = 3 * MOST
#: What is not looked at after a change.
_BEGIN_S: Final = 0.5
_LOOK_S: Final = 0.25


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Few, many until it has settled, many; then many with fixed limits."""
    options = f'fixed_s = {FIXED_S}, each_s = {EACH_S}, notes = "{folder / "notes"}"'
    config = _batching(MOST, OBJECTIVE_MS)
    with RunningPool(folder, "noted_models:Asleep", workers=1, options=options, config=config) as pool:
        pool.start()
        few = load.run(Job(load.endpoint(pool), 2.0, open=LEAST // 2))
        quiet = _tuning(pool)
        rising, path = _watched(pool, Job(load.endpoint(pool), max(8.0, seconds / 4), open=_OPEN))
        settled, hovering = _watched(pool, Job(load.endpoint(pool), seconds / 2, open=_OPEN))
        now = _tuning(pool)
        fixed = {}
        for limit in (MOST, LEAST):
            text = pool.file.read_text()
            pool.file.write_text(text.replace(config, _batching(limit, 0.0)))
            config = _batching(limit, 0.0)
            assert pool.ask("reload")["ok"]
            fixed[limit] = load.run(Job(load.endpoint(pool), max(3.0, seconds / 8), open=_OPEN))
    seen = [few, rising, settled, *fixed.values()]
    rates = {name: _rate(s) for name, s in (("tuned", settled), ("most", fixed[MOST]), ("least", fixed[LEAST]))}
    limits = [t["limit"] for t in path + hovering]
    return [
        equal("answers other than ok", sum(sum(s.codes.values()) - s.codes["ok"] for s in seen), 0),
        told(f"few: limit, state ({LEAST} is min_batch)", f"{quiet['limit']}, {quiet['state']}"),
        told("flood: limit and state over time", _story(path)),
        told("settled: limit and state over time", _story(hovering)),
        above("highest limit seen, while the objective was kept", max(limits), LEAST + 1, "", timed=True),
        above("cuts, when it was missed", now["cuts"], 1, "", timed=True),
        below("settled: p99 in the worker", _p99(settled), OBJECTIVE_MS, "ms", timed=True),
        above(f"max_batch {MOST}, no tuning: p99 in the worker", _p99(fixed[MOST]), OBJECTIVE_MS, "ms", timed=True),
        told(f"max_batch {LEAST}, no tuning: p99 in the worker", f"{_p99(fixed[LEAST]):.1f} ms"),
        told(f"requests/s: tuned, max_batch {MOST}, max_batch {LEAST}", ", ".join(f"{rate:.0f}" for rate in rates.values())),
        above(f"throughput tuned, of that with {LEAST}", rates["tuned"] / rates["least"], 1.5, "", timed=True),
        above(f"throughput tuned, of that with {MOST}", rates["tuned"] / rates["most"], 0.7, "", timed=True),
        told("state in status at the end", {k: now[k] for k in ("limit", "state", "raises", "cuts")}),
    ]


def _batching(limit: int, p99_ms: float) -> str:
    return f"[batching]\nmax_batch = {limit}\nmin_batch = {min(limit, LEAST)}\np99_ms = {p99_ms}\n"


def _tuning(pool: RunningPool) -> dict[str, Any]:
    status = pool.wait(lambda s: s["workers"][0].get("batching", {}).get("groups"))
    tuning: dict[str, Any] = status["workers"][0]["batching"]["groups"][0]["tuning"]
    return tuning


def _watched(pool: RunningPool, job: Job) -> tuple[Seen, list[dict[str, Any]]]:
    """Run a load and look at the tuner meanwhile, as `status` tells of it."""
    process, path = load.start(job), []
    until = time.monotonic() + job.seconds
    while time.monotonic() < until:
        path.append(_tuning(pool))
        time.sleep(_LOOK_S)
    return load.finish(process), path


def _story(path: list[dict[str, Any]]) -> str:
    steps = [f"{t['limit']} {t['state']}" for t in path]
    return ", ".join(step for before, step in zip([None, *steps], steps, strict=False) if step != before)


def _p99(seen: Seen) -> float:
    """Milliseconds from the arrival in the worker to the end of the batch, as each reply tells."""
    waited = zip(seen.ok_at, seen.queues_ms, seen.forwards_ms, strict=True)
    return load.percentile([queue + forward for at, queue, forward in waited if at >= _BEGIN_S], 0.99)


def _rate(seen: Seen) -> float:
    return seen.ok_per_s(_BEGIN_S, max(seen.ok_at) - _BEGIN_S)
