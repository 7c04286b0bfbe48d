"""Back-off, jitter, intensity."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.restart import Park, RestartHistory, RestartPolicy, Retry, after_death

POLICY = RestartPolicy(delays_s=(0.0, 5.0, 30.0), stable_after_s=300.0, max_restarts=5, period_s=600.0)


def delay(history: RestartHistory, now: float, *, stable: bool = False, policy: RestartPolicy = POLICY) -> float:
    decision = after_death(policy, history, now, stable=stable, rng=random.Random(1))
    assert isinstance(decision, Retry)
    return decision.at - now


def test_second_crash_within_the_period_waits_longer() -> None:
    history = RestartHistory.empty()
    assert delay(history, 100.0) == 0.0
    assert 5.0 <= delay(history, 110.0) <= 7.5
    assert 30.0 <= delay(history, 120.0) <= 45.0
    assert 30.0 <= delay(history, 130.0) <= 45.0


def test_a_stable_time_starts_again_from_the_first_delay() -> None:
    history = RestartHistory.empty()
    delay(history, 0.0)
    delay(history, 10.0)
    assert delay(history, 1000.0, stable=True) == 0.0


def test_too_many_deaths_in_the_period_park_with_a_try_later() -> None:
    history = RestartHistory.empty()
    for n in range(5):
        delay(history, 10.0 * n)
    decision = after_death(POLICY, history, 60.0, stable=False, rng=random.Random(1))
    assert decision == Park(60.0 + POLICY.half_open_s, "6 deaths in 600 s")


def test_deaths_spread_beyond_the_period_never_park() -> None:
    history = RestartHistory.empty()
    for n in range(50):
        delay(history, 200.0 * n)


@given(seed=st.integers(), gaps=st.lists(st.floats(0, 100), max_size=30))
def test_a_delay_is_never_below_its_step_nor_above_it_by_more_than_the_jitter(seed: int, gaps: list[float]) -> None:
    rng, history, now = random.Random(seed), RestartHistory.empty(), 0.0
    for n, gap in enumerate(gaps):
        now += gap
        match after_death(POLICY, history, now, stable=False, rng=rng):
            case Retry(at):
                base = POLICY.delays_s[min(n, 2)]
                assert base - 1e-9 <= at - now <= base * 1.5 + 1e-9
            case Park(half_open_at, _):
                assert half_open_at > now
                return
