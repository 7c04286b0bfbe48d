"""How long newcomers would wait."""

from __future__ import annotations

import pytest

from gpupool.link import Hello, Result
from gpupool.router.backlog import Backlog
from gpupool.router.balance import Reading, apply_readings
from gpupool.router.forecast import Forecast
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant
from gpupool.router.workers import Fleet, Worker


def worker(batch_s: float = 0.0, limit: int = 10) -> Worker:
    made = Worker(b"w", Hello(0, 1, 1, "", limit))
    made.batch_s = batch_s
    return made


ME = Tenant()


def backlog_of(rows: int) -> Backlog:
    ME.__init__()  # type: ignore[misc]  # what it had in another backlog counts no more
    backlog = Backlog()
    backlog.push(Request(b"c", ME, "i", 1, 0.0, 1.0, (), 0, rows=rows))
    return backlog


def test_wait_is_what_stands_before_over_the_speed_of_all() -> None:
    forecast, workers = Forecast(), [worker(0.5), worker(1.0)]
    workers[0].rows = 15

    forecast.update(workers)

    assert forecast.rows_per_s == pytest.approx(30.0)
    assert forecast.wait_s(backlog_of(45), workers, ME, 5) == pytest.approx(2.0)
    assert forecast.wait_s(backlog_of(45), workers, ME, 6) == pytest.approx(0.5)


def test_nothing_is_foretold_while_one_worker_is_unknown_or_nobody_is_there() -> None:
    forecast, workers = Forecast(), [worker(0.5), worker()]

    forecast.update(workers)
    assert forecast.wait_s(backlog_of(1000), workers, ME, 5) == 0.0
    forecast.update([])
    assert forecast.wait_s(backlog_of(1000), [], ME, 5) == 0.0


def test_duration_follows_slowly_and_heeds_real_batches_only() -> None:
    forecast, w = Forecast(), worker()

    forecast.learn(w, Result(1, "ok", batch_size=4, forward_s=1.0))
    assert w.batch_s == 1.0
    forecast.learn(w, Result(2, "ok", batch_size=4, forward_s=2.0))
    assert w.batch_s == pytest.approx(1.2)
    forecast.learn(w, Result(3, "cancelled", started=False, batch_size=4, forward_s=9.0))
    forecast.learn(w, Result(4, "invalid_input"))

    assert w.batch_s == pytest.approx(1.2)


def test_full_batches_take_what_the_workers_say_however_small_those_of_late_were() -> None:
    """Batches of one took 10 ms, of 9 + n ms: a full one of 32 takes 41."""
    forecast, fleet = Forecast(), Fleet(100, 1 << 20)
    small = Worker(b"w", Hello(0, 1, 1, "", 32))
    fleet.add(small)
    forecast.learn(small, Result(1, "ok", batch_size=1, forward_s=0.010))
    forecast.update([small])
    assert forecast.rows_per_s == pytest.approx(3200), "four times too fast"

    apply_readings(fleet, [Reading(0, 1, 1, 32, 0.010, full_row_s=0.041 / 32)], 0.0)
    forecast.update([small])

    assert forecast.rows_per_s == pytest.approx(32 / 0.041)
    assert forecast.wait_s(backlog_of(640), [small], ME, 5) == pytest.approx(20 * 0.041)


@pytest.mark.parametrize(
    "reading",
    [
        Reading(0, 1, 1, 32, 0.010),
        Reading(0, 1, 1, 32, 0.010, full_row_s=1e12),
        Reading(0, 2, 1, 32, 0.010, full_row_s=0.041 / 32),
    ],
)
def test_a_worker_that_knows_no_full_batch_is_judged_by_those_that_ran(reading: Reading) -> None:
    forecast, fleet = Forecast(), Fleet(100, 1 << 20)
    there = Worker(b"w", Hello(0, 1, 1, "", 32))
    fleet.add(there)
    there.batch_s = 0.010
    apply_readings(fleet, [Reading(0, 1, 1, 32, 0.010, full_row_s=0.041 / 32)], 0.0)

    apply_readings(fleet, [reading], 0.0)
    forecast.update([there])

    assert forecast.rows_per_s == pytest.approx(3200)


@pytest.mark.parametrize("size", [64, 20])
def test_a_limit_that_falls_does_not_make_the_batches_of_late_smaller(size: int) -> None:
    """Where no fit is good: 10 ms a row, and a fallen limit is not what ran in that time."""
    forecast, fleet = Forecast(), Fleet(100, 1 << 20)
    there = Worker(b"w", Hello(0, 1, 1, "", 64))
    fleet.add(there)
    for n in range(20):
        forecast.learn(there, Result(n, "ok", batch_size=size, forward_s=0.010 * size))

    apply_readings(fleet, [Reading(0, 1, 1, 4, 0.010)], 0.0)
    forecast.update([there])

    assert forecast.rows_per_s == pytest.approx(100)
    for n in range(60):
        forecast.learn(there, Result(n, "ok", batch_size=4, forward_s=0.100))
    forecast.update([there])
    assert forecast.rows_per_s == pytest.approx(40, rel=0.01)
