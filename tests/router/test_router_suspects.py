"""The queue of suspects."""

from __future__ import annotations

from gpupool.link import Hello
from gpupool.router.requests import Request
from gpupool.router.suspects import Suspects
from gpupool.router.tenants import Tenant
from gpupool.router.workers import Worker

TENANT = Tenant()


def suspect(sequence: int, died_on: int = 0) -> Request:
    request = Request(b"c", TENANT, str(sequence), sequence, 0.0, 10.0, (), 0)
    request.deaths, request.died_on = 1, died_on
    return request


def worker(slot: int, rows: int = 0) -> Worker:
    made = Worker(b"%d" % slot, Hello(slot, 1, 1, "", 8))
    if rows:
        busy = Request(b"c", TENANT, "busy", 0, 0.0, 10.0, (), 0, rows=rows)
        busy.ticket = 1
        made.give(busy)
    return made


def test_one_runs_at_a_time_in_order_of_arrival() -> None:
    suspects, workers = Suspects(), [worker(1)]
    suspects.add([suspect(2), suspect(1)])

    suspects.reserve(workers)
    first = suspects.take()
    assert first is not None
    assert first.sequence == 1
    suspects.reserve(workers)
    assert suspects.take() is None
    suspects.returned(first)
    assert suspects.reserved is None
    suspects.reserve(workers)
    second = suspects.take()

    assert second is not None
    assert second.sequence == 2


def test_reserved_is_the_least_busy_of_the_other_slots() -> None:
    suspects = Suspects()
    suspects.add([suspect(1, died_on=0)])
    workers = [worker(0), worker(1, rows=5), worker(2, rows=3)]

    suspects.reserve(workers)

    assert suspects.reserved is workers[2]
    assert suspects.take() is None  # it is busy still


def test_slot_of_the_death_must_do_when_it_is_the_only_one() -> None:
    suspects, only = Suspects(), worker(0)
    suspects.add([suspect(1, died_on=0)])

    suspects.reserve([only])

    assert suspects.reserved is only


def test_worker_that_may_get_no_work_any_more_is_replaced() -> None:
    suspects, first, second = Suspects(), worker(1), worker(2)
    suspects.add([suspect(1)])
    suspects.reserve([first])

    suspects.reserve([second])

    assert suspects.reserved is second
    suspects.reserve([])
    assert suspects.reserved is None


def test_reservation_ends_with_the_last_suspect() -> None:
    suspects, request = Suspects(), suspect(1)
    suspects.add([request])
    suspects.reserve([worker(1)])

    assert suspects.remove(request)
    assert not suspects.remove(request)
    suspects.reserve([worker(1)])

    assert suspects.reserved is None
    assert len(suspects) == 0
