"""Few requests are served as if there were no batching, many as if there were nothing else, and the change takes less than a second.

One worker, a forward of 10 ms whatever the batch, a limit of 32, no configuration but that. On one device some of the few come while
another runs, whatever is done about batching: what they are compared with is a bare loop that takes all that waits whenever it is free,
given the same arrivals. On three workers hardly anybody has to wait, and forward alone is the bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from demonstrations import load
from demonstrations.finding import Finding, above, below, equal, told
from demonstrations.load import Job, Seen
from support import noted_models
from support.noted_models import Note
from support.running import RunningPool

FORWARD_S: Final = 0.010
LIMIT: Final = 32
RATE: Final = 20.0
_SEED: Final = 7
#: Batches in a row that are called steady.
_STEADY: Final = 10
_PAYS_MS: Final = 2.0
CONFIG: Final = f"[batching]\nmax_batch = {LIMIT}\n"


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Few on three workers; then few, many and few again on one."""
    three, one = folder / "three", folder / "one"
    three.mkdir()
    one.mkdir()
    few = Job("", seconds, connections=4, rate=RATE, poisson=_SEED)
    with _pool(three, 3) as pool:
        pool.start()
        load.run(Job(load.endpoint(pool), 2.0, open=1))  # forecasts are learned, as in any pool that has been up for a while
        apart = load.run(_at(few, pool))
    with _pool(one, 1) as pool:
        pool.start()
        load.run(Job(load.endpoint(pool), 1.0, open=1))
        before = load.run(_at(few, pool))
        flood_at = time.monotonic()
        many = load.run(Job(load.endpoint(pool), max(4.0, seconds / 2), connections=4, open=4 * LIMIT))
        flood_until = time.monotonic()
        after = load.run(_at(few, pool))
        closed = pool.wait(lambda s: sum(s["workers"][0]["batching"]["closed"].values()) >= 1)["workers"][0]["batching"]
        notes = noted_models.read(one / "notes")
    flood = [n for n in notes if flood_at <= n.began <= flood_until]
    turned = _turned(flood)
    steady = flood[turned:-3]
    full_s = sum(n.ended - n.began for n in steady) / max(1, len(steady))
    span_s = steady[-1].ended - steady[0].began
    rows = sum(n.rows for n in steady)
    loop = _loop(load.arrivals(few.rate, few.seconds, few.poisson), sum(before.forwards_ms) / len(before.forwards_ms) / 1000)
    return [
        equal("answers other than ok", sum((apart.codes + before.codes + many.codes + after.codes).values()) - _ok(apart, before, many, after), 0),
        *_few("20/s, three workers", apart, apart.forwards_ms, "forward alone"),
        *_few("20/s, one worker", before, loop, "a bare loop"),
        told("  the same, of forward alone", _beside(before, before.forwards_ms)),
        *_few("20/s again, right after the flood", after, loop, "a bare loop"),
        told("flood: batches, mean forward", f"{len(steady)}, {1000 * full_s:.2f} ms"),
        above("flood: mean batch, of the limit", rows / len(steady) / LIMIT, 0.8, "", timed=True),
        above("flood: throughput, of full batches back to back", rows / span_s / (LIMIT / full_s), 0.95, "", timed=True),
        told("flood: requests/s", f"{rows / span_s:.0f}"),
        told("flood: gap between batches, of the batch time", f"{100 * (1 - sum(n.ended - n.began for n in steady) / span_s):.2f} %"),
        below("from the first batch of the flood to steady ones of 80 % and more", flood[turned].began - flood[0].began, 1.0, "s", timed=True),
        told("batches by why they closed", closed["closed"]),
    ]  # fmt: skip


def _pool(folder: Path, workers: int) -> RunningPool:
    options = f'fixed_s = {FORWARD_S}, notes = "{folder / "notes"}"'
    return RunningPool(folder, "noted_models:Asleep", workers=workers, options=options, config=CONFIG)


def _at(job: Job, pool: RunningPool) -> Job:
    return Job(load.endpoint(pool), job.seconds, connections=job.connections, rate=job.rate, poisson=job.poisson)


def _ok(*seen: Seen) -> int:
    return sum(s.codes["ok"] for s in seen)


def _few(what: str, seen: Seen, reference_ms: list[float], name: str) -> list[Finding]:
    return [
        below(
            f"{what}: {word} above {name}",
            1000 * load.percentile(seen.latencies["ok"], share) - load.percentile(reference_ms, share),
            _PAYS_MS,
            "ms",
            timed=True,
        )
        for word, share in (("p50", 0.5), ("p99", 0.99))
    ] + [told(f"  {what}: p50, p99 beside {name}", _beside(seen, reference_ms))]


def _beside(seen: Seen, reference_ms: list[float]) -> str:
    ours = [1000 * load.percentile(seen.latencies["ok"], share) for share in (0.5, 0.99)]
    theirs = [load.percentile(reference_ms, share) for share in (0.5, 0.99)]
    return f"{ours[0]:.2f}, {ours[1]:.2f} beside {theirs[0]:.2f}, {theirs[1]:.2f} ms"


def _loop(arrivals: list[float], forward_s: float) -> list[float]:
    """Milliseconds that each request takes in a loop that runs all that waits whenever it is free."""
    free, at, found = 0.0, 0, []
    while at < len(arrivals):
        began = max(free, arrivals[at])
        free = began + forward_s
        while at < len(arrivals) and arrivals[at] <= began:
            found.append(1000 * (free - arrivals[at]))
            at += 1
    return found


def _turned(flood: list[Note]) -> int:
    """Where steady batches of 80 % of the limit begin."""
    for at in range(len(flood) - _STEADY):
        if sum(n.rows for n in flood[at : at + _STEADY]) >= 0.8 * LIMIT * _STEADY:
            return at
    return len(flood) - 4
