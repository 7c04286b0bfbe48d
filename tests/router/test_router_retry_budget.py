"""The retry budget: what it holds, and what fills it."""

from __future__ import annotations

from gpupool.router.retry_budget import RetryBudget


def taken(budget: RetryBudget, successes: int, now: float) -> int:
    """How many can be taken at once."""
    count = 0
    while budget.take(successes, now):
        count += 1
    return count


def test_it_starts_with_what_all_workers_can_be_running() -> None:
    assert taken(RetryBudget(256), 0, 5.0) == 256
    assert taken(RetryBudget(1), 0, 5.0) == 100


def test_successes_and_time_fill_it_and_it_never_overflows() -> None:
    budget = RetryBudget(100)
    taken(budget, 0, 0.0)

    assert taken(budget, 50, 0.0) == 10
    assert taken(budget, 50, 2.0) == 20
    assert taken(budget, 1_000_000, 3.0) == 100


def test_what_is_left_is_told_without_taking_it() -> None:
    budget = RetryBudget(100)
    assert budget.left(0, 0.0) == 1.0
    taken(budget, 0, 0.0)

    assert [budget.left(50, 2.0) for _ in range(3)] == [0.3] * 3
    assert taken(budget, 50, 2.0) == 30
