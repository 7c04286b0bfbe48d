"""When an order has come true, read from status documents."""

from __future__ import annotations

import pytest

from gpupool.cli.waiting import drain_progress, restart_progress
from support.fake_pool import document, worker


@pytest.mark.parametrize("state", ["drained", "stopped", "parked", "lost", "quarantined", "unkillable"])
def test_a_drain_is_done_where_no_work_is_left(state: str) -> None:
    progress = drain_progress(document(worker(0, state)), {0: 1}, set())

    assert progress.settled and not progress.problems
    assert progress.workers == ({"worker": 0, "incarnation": 1, "state": state},)


@pytest.mark.parametrize("state", ["ready", "draining", "loading", "starting", "backing_off", "stopping"])
def test_a_drain_goes_on_while_a_worker_may_have_work(state: str) -> None:
    assert drain_progress(document(worker(0, state), worker(1)), {0: 1}, set()).waiting == (0,)


def test_a_drain_that_somebody_undid_is_a_problem() -> None:
    seen: set[int] = set()
    drain_progress(document(worker(0, "draining")), {0: 1}, seen)

    progress = drain_progress(document(worker(0, "ready")), {0: 1}, seen)

    assert progress.settled
    assert progress.problems == ("worker 0 was resumed before it had drained",)


def test_other_workers_do_not_matter() -> None:
    assert drain_progress(document(worker(0, "drained"), worker(1, "ready")), {0: 1}, set()).settled


@pytest.mark.parametrize("judge", [lambda d: drain_progress(d, {5: 1}, set()), lambda d: restart_progress(d, {5: 1})])
def test_a_worker_that_is_gone_from_the_pool_is_a_problem(judge: object) -> None:
    assert callable(judge)
    assert judge(document(worker(0))).problems == ("worker 5 is no longer part of the pool",)


@pytest.mark.parametrize("state", ["ready", "drained", "draining"])
def test_a_restart_is_done_when_the_next_incarnation_is_up(state: str) -> None:
    progress = restart_progress(document(worker(0, state, 4)), {0: 3})

    assert progress.settled and not progress.problems


@pytest.mark.parametrize(
    ("state", "incarnation"),
    [("ready", 3), ("draining", 3), ("stopping", 3), ("backing_off", 3), ("starting", 4), ("loading", 4)],
)
def test_a_restart_goes_on_until_then(state: str, incarnation: int) -> None:
    assert restart_progress(document(worker(0, state, incarnation)), {0: 3}).waiting == (0,)


@pytest.mark.parametrize(
    ("state", "incarnation"),
    [("backing_off", 4), ("parked", 4), ("quarantined", 4), ("lost", 3), ("unkillable", 3), ("stopped", 4), ("loading", 5)],
)
def test_a_restart_that_failed_is_told_with_the_last_exit(state: str, incarnation: int) -> None:
    entry = worker(0, state, incarnation, last_exit={"code": 70, "signal": None}, reason="load raised")

    (problem,) = restart_progress(document(entry), {0: 3}).problems

    assert problem == f"worker 0 did not get ready: it is {state}; reason: load raised; last exit: code 70"


def test_one_worker_may_fail_while_another_still_loads() -> None:
    progress = restart_progress(document(worker(0, "parked", 2), worker(1, "loading", 2)), {0: 1, 1: 1})

    assert progress.waiting == (1,)
    assert len(progress.problems) == 1
