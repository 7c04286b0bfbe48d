"""The fit of batch times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
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


def test_a_line_that_misses_is_poor() -> None:
    fit, rng = BatchFit(), random.Random(1)
    for _ in range(100):
        fit.add(4, rng.choice([0.001, 0.1]))

    assert fit.known
    assert not fit.good


def test_noise_of_a_tenth_is_good_and_so_is_that_of_the_clock() -> None:
    noisy, tiny, rng = BatchFit(), BatchFit(), random.Random(1)
    for _ in range(100):
        n = rng.randint(1, 32)
        noisy.add(n, (0.004 + 0.0005 * n) * rng.uniform(0.9, 1.1))
        tiny.add(n, rng.uniform(0.00005, 0.0002))

    assert noisy.good
    assert noisy.fixed_s == pytest.approx(0.004, rel=0.2)
    assert tiny.good


def test_one_wild_batch_neither_bends_nor_damns_the_line() -> None:
    fit, rng = BatchFit(), random.Random(1)
    for _ in range(60):
        n = rng.randint(1, 32)
        fit.add(n, 0.004 + 0.0005 * n)
    fit.add(16, 30.0)

    assert fit.good
    assert fit.predict(16) == pytest.approx(0.012, rel=0.2)


def test_a_model_that_becomes_slower_is_poor_for_a_while_and_good_again() -> None:
    fit = BatchFit()
    for n in range(60):
        fit.add(1 + n % 8, 0.001 + 0.001 * (1 + n % 8))
    verdicts = []
    for n in range(300):
        fit.add(1 + n % 8, 10 * (0.001 + 0.001 * (1 + n % 8)))
        verdicts.append(fit.good)

    assert verdicts[-1]
    assert fit.predict(8) == pytest.approx(0.09, rel=0.05)


def test_the_first_batch_does_not_count_when_others_have_come() -> None:
    fit = BatchFit()
    fit.add(8, 5.0)
    for n in range(20):
        fit.add(1 + n % 8, 0.001 * (1 + n % 8))

    assert fit.predict(8) == pytest.approx(0.008)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100)), min_size=1, max_size=60))
def test_coefficients_are_never_negative(batches: list[tuple[int, float]]) -> None:
    fit = BatchFit()
    for samples, seconds in batches:
        fit.add(samples, seconds)
        assert fit.fixed_s >= 0.0
        assert fit.per_sample_s >= 0.0
