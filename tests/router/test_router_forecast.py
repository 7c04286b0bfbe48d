"""How long newcomers would wait."""

from __future__ import annotations

import pytest

from gpupool.link import Hello, Result
from gpupool.router.backlog import Backlog
from gpupool.router.forecast import Forecast
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant
from gpupool.router.workers import Worker


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
