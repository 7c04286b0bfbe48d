"""What a scrape costs the supervisor: the page of a pool whose every metric has values, by workers and models; no process is started."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

from gpupool.supervisor.metrics import page
from gpupool.supervisor.tallies import Tallies
from support.full_page import books, full, reports

SHAPES: Final = ((1, 1), (8, 4), (16, 10), (16, 64), (256, 1))
Counted = dict[str, Any]
_COUNTED: Final = ("replied_by_model", "latencies", "log", "redispatched_total")


def scrape_cost(*, quick: bool) -> None:
    """Time the page, the sums over restarts before it, and what is added up each second without any scrape."""
    runs = 3 if quick else 15
    print("## A scrape: the supervisor's time on its loop\n")
    print("| workers | models | series | page, KiB | page, ms | sums, ms | each second without a scrape, ms |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for workers, models in SHAPES:
        status, counts = full(workers, models)
        told, routed = Tallies(), Tallies()
        counted = {key: value for key, value in books(models).items() if key in _COUNTED}
        worker = reports(models)

        for incarnation in (1, 2):
            _listen(told, routed, worker, counted, workers, incarnation)
        told_each: list[float] = []
        for run in range(runs):  # no two alike: what says nothing new is passed over
            changed = {**worker, "oom": 3 + run}, {**counted, "late_results_total": run}
            told_each.append(_ms(partial(_listen, told, routed, *changed, workers, 2), 1))
        text = page(status, counts)
        series = sum(not line.startswith("#") for line in text.splitlines())
        listening, adding = median(told_each), _ms(partial(_add_up, told, routed, workers), runs)
        writing = _ms(partial(page, status, counts), runs)
        print(
            f"| {workers} | {models} | {series:,} | {len(text) / 1024:.0f} | {writing:.1f} | {adding:.1f} | {listening:.1f} |"
        )
    print()


def _listen(told: Tallies, routed: Tallies, worker: Counted, router: Counted, workers: int, incarnation: int) -> None:
    for slot in range(workers):
        told.tell(slot, incarnation, worker)
    routed.tell(0, incarnation, router)


def _add_up(told: Tallies, routed: Tallies, workers: int) -> None:
    for slot in range(workers):
        told.total(slot)
    routed.total(0)


def _ms(act: Callable[[], object], runs: int) -> float:
    took: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        act()
        took.append(1e3 * (time.perf_counter() - began))
    return median(took)
