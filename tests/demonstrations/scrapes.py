"""200 restarts of workers, and some of the router, between scrapes: the page stays as large and as quick, and no counter goes back."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from demonstrations.finding import Finding, below, equal, told
from support.running import FAST, RunningPool

_RESTARTS_PER_S: Final = 2  # of the time that is given: 200 in 100 s
_EACH_ROUTER: Final = 40  # restarts of workers to one of the router's
_SCRAPES: Final = 21
_SCRAPE_MS: Final = 100.0
CONFIG: Final = FAST.replace("restart_delays_s = [0.0, 0.5, 1.0]", "restart_delays_s = [0.0]\nmax_restarts = 100000")

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Kill the workers in turn, ask something of each new one, and read the page after each death."""
    restarts, back = int(_RESTARTS_PER_S * seconds), 0
    with RunningPool(folder, config=CONFIG) as pool:
        pool.start()
        with pool.client() as client:
            for n in range(40):
                client.call({"i": n})
            for slot in (0, 1):  # once each, so that all series are there
                _kill(pool, slot)
            client.call({"i": 0})
            time.sleep(2.0)  # reports of these batches
            first, first_ms = _scrape(pool)
            before = _counters(first)
            for n in range(restarts):
                _kill(pool, n % 2)
                if n % _EACH_ROUTER == _EACH_ROUTER - 1:
                    _kill_router(pool)
                client.call({"i": n})
                after = _counters(_scrape(pool, 1)[0])
                back += sum(after.get(key, 0.0) < value for key, value in before.items())
                before = after
        time.sleep(2.0)
        last, last_ms = _scrape(pool)
    grown = _names(last) - _names(first)
    return [
        told("restarts of workers", restarts),
        equal("counters that went back", back, 0),
        told("series before and after", f"{len(_names(first))}, {len(_names(last))}"),
        equal("new series, but for reasons why batches closed", {n for n in grown if "batch_close" not in n}, set()),
        told("page before and after, bytes", f"{len(first):,}, {len(last):,}"),
        told("a scrape before and after, ms", f"{first_ms:.1f}, {last_ms:.1f}"),
        below("a scrape after them", last_ms, _SCRAPE_MS, "ms", timed=True),
    ]


def _kill(pool: RunningPool, slot: int) -> None:
    worker = pool.worker(slot)
    os.kill(worker["pid"], signal.SIGKILL)
    pool.wait_for_incarnation(slot, worker["incarnation"] + 1)


def _kill_router(pool: RunningPool) -> None:
    router = pool.status()["router"]
    os.kill(router["pid"], signal.SIGKILL)
    pool.wait(lambda s: s["router"]["restarts"] > router["restarts"] and s["pool"]["workers_ready"] == 2)
    time.sleep(0.5)  # our raw client sends nothing twice: it waits until it is connected again


def _scrape(pool: RunningPool, times: int = _SCRAPES) -> tuple[str, float]:
    """The page, and the median of how long it took to read, in ms."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        took.append(1e3 * (time.perf_counter() - began))
    return text, median(took)


def _names(text: str) -> set[str]:
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


def _counters(text: str) -> Values:
    return {
        (s.name, tuple(s.labels.items())): s.value
        for f in text_string_to_metric_families(text)
        if f.type in ("counter", "histogram")
        for s in f.samples
    }
