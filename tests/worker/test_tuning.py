"""The search for the largest batch that keeps a latency objective."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.spec import BatchingSpec
from gpupool.worker.fit import BatchFit
from gpupool.worker.tuning import Tuning, TuningState

POLICY = BatchingSpec(max_batch=32, min_batch=8, p99_ms=50.0)


def saturate(tuning: Tuning, batches: int, fixed_s: float, each_s: float, cap: int = 1000) -> BatchFit:
    """Full batches with another one ahead of each, as under steady load."""
    fit = BatchFit()
    for _ in range(batches):
        rows = min(tuning.limit, cap)
        seconds = fixed_s + each_s * rows
        fit.add(rows, seconds)
        tuning.ran(rows, [2 * seconds] * rows, rows, fit)
    return fit


def test_it_starts_at_min_batch_and_rises_while_the_objective_is_kept() -> None:
    tuning = Tuning(POLICY)
    assert tuning.limit == 8

    saturate(tuning, 1000, 0.002, 0.0001)

    assert (tuning.limit, tuning.state, tuning.cuts) == (32, TuningState.HIGHEST, 0)


def test_it_hovers_below_the_size_that_breaks_the_objective() -> None:
    tuning = Tuning(POLICY)
    saturate(tuning, 500, 0.005, 0.001)  # 2 (5 + n) ms: 20 is the most
    limits = set()
    for _ in range(500):
        saturate(tuning, 1, 0.005, 0.001)
        limits.add(tuning.limit)

    assert max(limits) == 21
    assert min(limits) == int(0.75 * 21)


def test_it_follows_a_device_that_slows_down() -> None:
    tuning = Tuning(POLICY)
    saturate(tuning, 500, 0.002, 0.0001)
    saturate(tuning, 200, 0.005, 0.002)

    assert tuning.limit <= 11
    assert tuning.cuts > 0


def test_an_objective_below_two_batches_of_one_is_not_acted_on() -> None:
    tuning = Tuning(POLICY)
    saturate(tuning, 100, 0.040, 0.001)

    assert (tuning.limit, tuning.state) == (32, TuningState.UNREACHABLE)

    fit = BatchFit()
    for _ in range(40):
        fit.add(8, 0.001)
    tuning.ran(8, [0.002] * 8, 32, fit)
    assert tuning.state is TuningState.RISING


def test_batches_all_alike_say_nothing_of_batches_of_one() -> None:
    tuning, fit = Tuning(POLICY), BatchFit()
    for _ in range(40):
        fit.add(20, 0.0251)

    tuning.ran(20, [0.030] * 20, 20, fit)

    assert (tuning.limit, tuning.state) == (8, TuningState.RISING)


def test_batches_that_are_not_full_say_nothing() -> None:
    tuning, fit = Tuning(POLICY), BatchFit()
    for _ in range(100):
        tuning.ran(7, [9.0] * 7, 8, fit)

    assert (tuning.limit, tuning.cuts) == (8, 0)


def test_one_late_sample_in_a_hundred_is_allowed() -> None:
    tuning, fit = Tuning(POLICY), BatchFit()
    for turn in range(13):
        tuning.ran(8, [9.0 if turn == 5 else 0.01, *[0.01] * 7], 8, fit)

    assert (tuning.limit, tuning.cuts) == (9, 0)


def test_it_does_not_rise_where_something_else_is_the_limit() -> None:
    tuning = Tuning(POLICY)
    saturate(tuning, 500, 0.001, 0.0, cap=4)

    assert tuning.limit == 8


def test_the_search_itself_keeps_the_objective_once_it_has_settled() -> None:
    """Under steady load, each sample waits for the batch before its own: 2 (5 + n) ms, so 20 is the most."""
    tuning, fit, before = Tuning(POLICY), BatchFit(), 0.0
    late = seen = 0
    states = set()
    for turn in range(6000):
        rows = tuning.limit
        seconds = 0.005 + 0.001 * rows
        waited_s, before = before + seconds, seconds
        fit.add(rows, seconds)
        tuning.ran(rows, [waited_s] * rows, rows, fit)
        if turn >= 500:
            seen += rows
            late += rows * (waited_s > 0.050)
            states.add(tuning.state)

    assert 0 < late / seen <= 0.01, "it still tries more now and then"
    assert states == {TuningState.RISING, TuningState.CUT, TuningState.SETTLED}
    assert tuning.cuts >= 3


def test_a_device_that_becomes_faster_is_followed_beyond_the_size_that_broke_the_objective() -> None:
    tuning = Tuning(POLICY)
    saturate(tuning, 500, 0.005, 0.001)
    assert tuning.limit < 21
    saturate(tuning, 1500, 0.002, 0.0001)

    assert (tuning.limit, tuning.state) == (32, TuningState.HIGHEST)


@pytest.mark.parametrize("storm", [0, 500, 5000])
def test_what_was_late_while_everything_was_late_is_not_owed_for_ever(storm: int) -> None:
    """A neighbour has the machine for a while, then 19 is the most, then any size keeps the objective."""
    tuning, fit = Tuning(POLICY), BatchFit()

    def run(seconds: float) -> int:
        rows = tuning.limit
        tuning.ran(rows, [seconds] * rows, rows, fit)
        return rows

    for _ in range(storm):
        run(0.2)
    for _ in range(3000):
        run(0.06 if tuning.limit > 19 else 0.03)
    samples = 0
    while tuning.limit < 32 and samples < 100_000:
        samples += run(0.03)

    assert samples < 200 * 3 * 20 + 5000, "as long as it takes for the late ones of one try, and for the steps"


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=300))
def test_never_more_is_owed_than_a_try_can_cost(batches: list[tuple[bool, int]]) -> None:
    tuning, fit = Tuning(BatchingSpec(max_batch=64, min_batch=8, p99_ms=50.0)), BatchFit()
    for late, rows in batches:
        tuning.ran(rows, [0.06 if late else 0.03] * rows, tuning.limit, fit)

    samples = 0
    while tuning.limit < 64 and samples < 500_000:
        samples += tuning.limit
        tuning.ran(tuning.limit, [0.03] * tuning.limit, tuning.limit, fit)

    assert samples < 200 * 3 * 64 + 64 * (100 + 4 * 64)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1)), max_size=200), st.integers(1, 64))
def test_the_limit_stays_between_one_and_the_configured_one(batches: list[tuple[int, float]], most: int) -> None:
    tuning = Tuning(BatchingSpec(max_batch=most, min_batch=min(8, most), p99_ms=50.0))
    fit = BatchFit()
    for rows, seconds in batches:
        tuning.ran(rows, [seconds] * rows, min(rows, tuning.limit), fit)
        assert 1 <= tuning.limit <= most


def test_it_tells_its_state() -> None:
    tuning = Tuning(POLICY)
    saturate(tuning, 30, 0.001, 0.0)

    told = tuning.describe()

    assert told["p99_ms"] == pytest.approx(50.0)
    assert (told["limit"], told["state"]) == (tuning.limit, "rising")
    assert told["raises"] > 0
