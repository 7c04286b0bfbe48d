"""Rates, quantiles and rows of `top`, from two status documents."""

from __future__ import annotations

from typing import Any

import pytest

from gpupool.cli.rates import head, quantile, rows
from support.fake_pool import document, worker


def at(uptime_s: float, *workers: dict[str, Any], pid: int = 1, **router: Any) -> dict[str, Any]:
    made = document(*workers, **router)
    made["pool"] |= {"uptime_s": uptime_s, "pid": pid, "workers_ready": 2, "workers_configured": 2}
    return made


def test_rates_are_by_the_pools_own_clock_and_by_code() -> None:
    before = at(10.0, replied_total={"ok": 100, "overloaded": 5}, pending=3, in_flight=4)
    now = at(12.0, replied_total={"ok": 150, "overloaded": 5, "model_error": 1}, pending=1, in_flight=2)

    seen = head(now, before)
    assert (seen.pending, seen.in_flight, seen.ready, seen.configured) == (1, 2, 2, 2)
    assert seen.ok_per_s == 25.0
    assert seen.errors_per_s == {"model_error": 0.5}


@pytest.mark.parametrize(
    "before",
    [None, at(12.0), at(99.0), at(10.0, pid=2), at(10.0, restarts=1)],
    ids=["none", "the same instant", "from the future", "another run", "another router"],
)
def test_without_a_document_of_the_same_processes_there_is_no_rate(before: dict[str, Any] | None) -> None:
    seen = head(at(12.0, replied_total={"ok": 3}, restarts=2), before)

    assert (seen.ok_per_s, seen.errors_per_s, seen.p50_ms, seen.p99_ms) == (None, None, None, None)


def test_quantiles_are_of_the_replies_between_the_two_and_of_all_models() -> None:
    def latency(*counts: int) -> dict[str, Any]:
        return {"total": {"bounds_ms": [1.0, 10.0, 100.0], "counts": list(counts)}}

    before = at(10.0, latency={"a": latency(0, 1000, 0, 0)})
    now = at(11.0, latency={"a": latency(50, 1000, 0, 0), "b": latency(0, 49, 1, 0)})

    seen = head(now, before)
    assert seen.p50_ms == 1.0
    assert seen.p99_ms == 10.0


@pytest.mark.parametrize(
    ("counts", "share", "wanted"),
    [
        ([10, 0, 0, 0], 0.5, 0.5),
        ([0, 10, 0, 0], 0.5, 5.5),
        ([1, 1, 1, 1], 0.99, 100.0),
        ([0, 0, 0, 3], 0.5, 100.0),
        ([0, 0, 0, 0], 0.5, None),
        ([], 0.5, None),
    ],
)
def test_quantiles_of_a_histogram(counts: list[int], share: float, wanted: float | None) -> None:
    assert quantile([1.0, 10.0, 100.0], counts, share) == wanted


def test_a_worker_of_late_is_the_difference_and_a_new_process_begins_anew() -> None:
    before = at(10.0, worker(0, batches_total=10, samples_total=100), worker(1, batches_total=10, samples_total=100))
    now = at(
        12.0,
        worker(0, batches_total=14, samples_total=112, service_ms=0.5, queue_length=7, running=3),
        worker(1, incarnation=2, batches_total=1, samples_total=1),
        worker(2, "starting", batches_total=0),
    )

    busy, new, unknown = rows(now, before)
    assert (busy.batch, busy.rows_per_s, busy.sample_ms, busy.queue, busy.running) == (3.0, 6.0, 0.5, 7, 3)
    assert (new.batch, new.rows_per_s) == (None, None)
    assert (unknown.state, unknown.batch, unknown.rows_per_s) == ("starting", None, None)


def test_one_that_ran_nothing_has_a_rate_of_nought_and_no_batch() -> None:
    idle = worker(0, batches_total=4, samples_total=9)
    (row,) = rows(at(2.0, idle), at(1.0, idle))

    assert (row.rows_per_s, row.batch) == (0.0, None)


def test_a_cards_figures_are_shown_and_the_hosts_memory_without_one() -> None:
    card = {"id": "GPU-7", "health": "degraded", "utilization": 0.5, "memory_used_bytes": 5, "temperature_c": 71.0}
    on_card, on_cpu = rows(at(1.0, worker(0, device=card, memory={"rss_bytes": 9}), worker(1, memory={"rss_bytes": 9})), None)

    assert (on_card.health, on_card.utilization, on_card.memory_bytes, on_card.temperature_c) == ("degraded", 0.5, 5, 71.0)
    assert (on_cpu.utilization, on_cpu.memory_bytes, on_cpu.temperature_c) == (None, 9, None)
