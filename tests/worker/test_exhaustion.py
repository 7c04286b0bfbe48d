"""When failures for want of memory mean that the process should be replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpupool.worker.exhaustion import FAILURES, LOOK_AGAIN_S, LOOKS, WINDOW_S, Exhaustion

FIXED, BUDGET = 100, 1000
GROWN = 201


def begun() -> Exhaustion:
    exhaustion = Exhaustion()
    exhaustion.begin(fixed_bytes=FIXED, budget_bytes=lambda: BUDGET)
    return exhaustion


def suspicious() -> Exhaustion:
    exhaustion = begun()
    for second in range(FAILURES):
        exhaustion.failed(1, float(second))
    return exhaustion


def test_failures_alone_prove_nothing() -> None:
    """Or whoever sends samples that are too large could have workers replaced."""
    exhaustion = begun()
    looks = 0
    for second in range(1000):
        exhaustion.failed(5, float(second))
        if exhaustion.suspects(float(second)):
            exhaustion.judge(FIXED + BUDGET // 10, float(second))
            looks += 1

    assert exhaustion.recycle_reason is None
    assert exhaustion.failures == 5000
    assert 50 < looks <= 1000 / LOOK_AGAIN_S


def test_memory_held_alone_proves_nothing_until_batches_fail() -> None:
    exhaustion = begun()
    for second in range(FAILURES - 1):
        exhaustion.failed(1, float(second))
        assert not exhaustion.suspects(float(second))


def test_failures_with_memory_lost_ask_for_a_new_process() -> None:
    exhaustion = begun()
    for at in (0.0, 4.0, 10.0):
        exhaustion.failed(1, at)
    assert exhaustion.suspects(11.0)

    for _ in range(LOOKS):
        assert exhaustion.suspects(11.0)
        assert exhaustion.recycle_reason is None
        exhaustion.judge(GROWN, 11.0)

    assert not exhaustion.suspects(12.0)
    assert exhaustion.recycle_reason is not None
    assert f"{FAILURES} times in 10 s" in exhaustion.recycle_reason


def test_what_is_there_for_one_look_only_is_not_lost() -> None:
    exhaustion = suspicious()
    for _ in range(LOOKS - 1):
        exhaustion.judge(GROWN, 3.0)
    exhaustion.judge(FIXED, 4.0)

    assert exhaustion.recycle_reason is None
    assert not exhaustion.suspects(100.0)


def test_failures_far_apart_do_not() -> None:
    exhaustion = begun()
    for n in range(10):
        exhaustion.failed(1, n * WINDOW_S)
        assert not exhaustion.suspects(n * WINDOW_S)


def test_what_is_found_whole_is_not_looked_at_again_before_it_fails_again() -> None:
    exhaustion = suspicious()
    exhaustion.judge(FIXED, 3.0)
    assert not exhaustion.suspects(100.0)

    for second in range(FAILURES):
        assert not exhaustion.suspects(100.0)
        exhaustion.failed(1, 100.0 + second)
    assert exhaustion.suspects(103.0)


def test_it_is_asked_again_while_memory_is_lost_but_not_each_time() -> None:
    exhaustion = suspicious()
    asked = []
    for second in range(3, 100):
        if exhaustion.suspects(float(second)):
            exhaustion.judge(GROWN, float(second))
        if exhaustion.take_reason():
            asked.append(second)

    first = FAILURES + LOOKS - 1
    assert asked == list(range(first, 100, int(LOOK_AGAIN_S) + LOOKS - 1))


def test_a_worker_that_is_never_without_work_is_judged_all_the_same_in_the_end() -> None:
    exhaustion = suspicious()
    asked = []
    for second in range(FAILURES, 1000):
        exhaustion.failed(1, float(second))
        if exhaustion.overdue(float(second)):
            exhaustion.judge(GROWN, float(second))
        if exhaustion.take_reason():
            asked.append(second)

    first, between = FAILURES + int(WINDOW_S) + LOOKS - 2, int(WINDOW_S) + LOOKS - 1
    assert asked == list(range(first, 1000, between))


def test_before_loading_is_done_nothing_is_judged() -> None:
    exhaustion = Exhaustion()
    for second in range(10):
        exhaustion.failed(1, float(second))
        assert not exhaustion.suspects(float(second))
        assert not exhaustion.overdue(float(second))


def test_what_counts_as_lost_follows_the_budget() -> None:
    """A reload may cut it to a fraction."""
    exhaustion, budget = Exhaustion(), BUDGET
    exhaustion.begin(fixed_bytes=FIXED, budget_bytes=lambda: budget)
    for second in range(FAILURES):
        exhaustion.failed(1, float(second))
    budget = 100

    for _ in range(LOOKS):
        exhaustion.judge(FIXED + 50, 3.0)

    assert exhaustion.recycle_reason is not None


def test_of_two_that_judge_the_second_finds_the_suspicion_gone() -> None:
    """The beat and the work loop may have asked at the same moment."""
    exhaustion = suspicious()
    exhaustion.judge(FIXED, 3.0)
    for _ in range(LOOKS):
        exhaustion.judge(GROWN, 3.0)

    assert exhaustion.recycle_reason is None


def test_a_look_from_before_the_last_failure_does_not_clear_the_suspicion() -> None:
    exhaustion = suspicious()
    looked_at = 5.0
    exhaustion.failed(1, 5.5)

    exhaustion.judge(FIXED, looked_at)

    assert exhaustion.suspects(6.0)


@pytest.mark.parametrize(
    "write",
    [lambda e: e.failed(1, 9.0), lambda e: e.judge(FIXED, 9.0), lambda e: e.take_reason()],
    ids=["failed", "judge", "take_reason"],
)
def test_each_writer_waits_for_the_other(write: Callable[[Exhaustion], object]) -> None:
    seen: list[str] = []

    class Guard:
        def __enter__(self) -> None:
            seen.append(repr(vars(exhaustion)))

        def __exit__(self, *_: object) -> None:
            seen.append(repr(vars(exhaustion)))

    exhaustion = Exhaustion(Guard())
    exhaustion.begin(fixed_bytes=FIXED, budget_bytes=int)
    for second in range(FAILURES):
        exhaustion.failed(1, float(second))
    exhaustion.recycle_reason = "asked before"
    seen.clear()
    before = repr(vars(exhaustion))

    write(exhaustion)

    assert seen == [before, repr(vars(exhaustion))], "it enters once, and all that changes does so inside"
    assert seen[0] != seen[1]
