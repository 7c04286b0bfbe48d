"""The fit of batch times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.worker.fit import EVIDENCE, BatchFit


def test_fixed_and_per_sample_cost_are_told_apart() -> None:
    fit = BatchFit()
    rng = random.Random(1)

    for _ in range(50):
        n = rng.randint(1, 32)
        fit.add(n, 0.004 + 0.0005 * n)

    assert fit.fixed_s == pytest.approx(0.004)
    assert fit.per_sample_s == pytest.approx(0.0005)
    assert fit.predict(64) == pytest.approx(0.036)


def test_nothing_is_known_before_enough_batches() -> None:
    fit = BatchFit()
    for _ in range(EVIDENCE - 1):
        fit.add(4, 0.01)

    assert not fit.known
    assert fit.predict(4) == 0.0

    fit.add(4, 0.01)
    assert fit.known


def test_batches_all_alike_count_as_fixed_cost() -> None:
    fit = BatchFit()
    for _ in range(20):
        fit.add(1, 0.02)

    assert fit.fixed_s == pytest.approx(0.02)
    assert fit.per_sample_s == 0.0


def test_a_card_that_slows_down_is_followed_within_some_hundred_batches() -> None:
    fit = BatchFit()
    for n in range(100):
        fit.add(1 + n % 8, 0.001 + 0.001 * (1 + n % 8))
    for n in range(150):
        fit.add(1 + n % 8, 0.002 + 0.002 * (1 + n % 8))

    assert fit.fixed_s == pytest.approx(0.002, rel=0.05)
    assert fit.per_sample_s == pytest.approx(0.002, rel=0.05)


def test_time_steeper_than_proportional_leaves_nothing_to_save() -> None:
    fit = BatchFit()
    for n in range(40):
        size = 1 + n % 8
        fit.add(size, 0.001 * size * size)

    assert fit.fixed_s == 0.0
    assert fit.per_sample_s > 0.0


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100)), min_size=1, max_size=60))
def test_coefficients_are_never_negative(batches: list[tuple[int, float]]) -> None:
    fit = BatchFit()
    for samples, seconds in batches:
        fit.add(samples, seconds)
        assert fit.fixed_s >= 0.0
        assert fit.per_sample_s >= 0.0
