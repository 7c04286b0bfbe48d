"""Limits by healthy share: down at once, up after a dwell time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.capacity import Capacity, DegradeRule, Factors, factors_for

RULES = (DegradeRule(1.0, 0.75, 0.5), DegradeRule(0.51, 0.5, 0.2))


def test_the_last_rule_whose_bound_holds_applies() -> None:
    assert factors_for(RULES, 4, 4) == Factors(1.0, 1.0)
    assert factors_for(RULES, 3, 4) == Factors(0.75, 0.5)
    assert factors_for(RULES, 2, 4) == Factors(0.5, 0.2)
    assert factors_for(RULES, 0, 4) == Factors(0.5, 0.2)


def test_limits_shrink_at_once_and_return_after_the_dwell_time() -> None:
    capacity = Capacity(RULES, dwell_s=5.0)
    assert capacity.update(3, 4, 10.0) == Factors(0.75, 0.5)
    assert capacity.update(4, 4, 11.0) == Factors(0.75, 0.5)
    assert capacity.update(4, 4, 15.9) == Factors(0.75, 0.5)
    assert capacity.update(4, 4, 16.0) == Factors(1.0, 1.0)


def test_a_flapping_worker_does_not_swing_the_limits() -> None:
    capacity = Capacity(RULES, dwell_s=5.0)
    for n in range(100):
        assert capacity.update(3 + n % 2, 4, float(n)) == Factors(0.75, 0.5)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 8)), max_size=40))
def test_factors_never_exceed_what_the_rules_allow(steps: list[tuple[float, int]]) -> None:
    capacity, now = Capacity(RULES), 0.0
    for gap, healthy in steps:
        now += gap
        assert capacity.update(healthy, 8, now).batch <= factors_for(RULES, healthy, 8).batch


def test_the_level_names_the_rule_in_force() -> None:
    capacity = Capacity(RULES, dwell_s=5.0)
    assert [capacity.update(healthy, 4, 10.0).level for healthy in (4, 3, 2)] == [0, 1, 2]
    assert capacity.update(4, 4, 11.0).level == 2, "until the dwell time is over"
    assert capacity.update(4, 4, 16.0).level == 0
