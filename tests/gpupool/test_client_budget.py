"""What a client may send on top of its callers' requests."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gpupool.client.budget import HEDGE_BURST, HEDGE_SHARE, RETRIES_PER_S, RETRY_BURST, RETRY_SHARE, Budget, Budgets


def test_burst_is_there_from_the_start_and_then_a_share_of_the_requests() -> None:
    budget = Budget(share=0.25, burst=3)
    assert [budget.withdraw(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(4):
        budget.deposit()
    assert [budget.withdraw(0.0) for _ in range(2)] == [True, False]


def test_time_fills_it_too_and_never_above_the_burst() -> None:
    budget = Budget(share=0.0, burst=2, per_s=0.5)
    assert [budget.withdraw(100.0) for _ in range(3)] == [True, True, False]
    assert not budget.withdraw(101.0)
    assert budget.withdraw(102.0)
    assert [budget.withdraw(1e9) for _ in range(3)] == [True, True, False]
    assert not budget.withdraw(0.0)  # a clock that went back costs nothing and gives nothing


@given(st.integers(0, 2000), st.floats(0.0, 30.0), st.integers(0, 99))
def test_withdrawals_stay_within_burst_share_and_time(requests: int, seconds: float, seed: int) -> None:
    budgets, rng, now, retries, hedges = Budgets(), random.Random(seed), 0.0, 0, 0
    for _ in range(requests):
        now += seconds / max(requests, 1)
        budgets.retries.deposit()
        budgets.hedges.deposit()
        for _ in range(rng.randrange(4)):
            retries += budgets.retries.withdraw(now)
            hedges += budgets.hedges.withdraw(now)
    assert retries <= RETRY_BURST + RETRY_SHARE * requests + RETRIES_PER_S * now
    assert hedges <= HEDGE_BURST + HEDGE_SHARE * requests
