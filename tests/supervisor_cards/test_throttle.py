"""How a hot card's share falls and comes back, in virtual seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.cards.throttle import HOT_BITS, LOWEST, Throttle


def run(throttle: Throttle, bits: int, begin: int, end: int) -> dict[int, float]:
    """One reading a second; the instants at which the factor changed."""
    return {now: throttle.factor for now in range(begin, end) if throttle.update(bits, float(now))}


@pytest.mark.parametrize("bit", [0x20, 0x40, 0x80])
def test_throttling_halves_after_30_s_and_again_60_s_later_down_to_a_quarter(bit: int) -> None:
    assert run(Throttle(), bit, 1000, 2000) == {1030: 0.5, 1090: 0.25}


def test_the_power_cap_of_a_loaded_card_is_no_throttling() -> None:
    assert run(Throttle(), 0x4 | 0x1 | 0x8, 0, 1000) == {}


def test_a_share_comes_back_by_quarters_after_120_s_clean() -> None:
    throttle = Throttle()
    run(throttle, 0x40, 0, 100)
    assert throttle.factor == 0.25
    assert run(throttle, 0, 100, 1000) == {219: 0.5, 279: 0.75, 339: 1.0}


def test_hot_again_in_between_begins_anew() -> None:
    throttle = Throttle()
    run(throttle, 0x40, 0, 31)
    assert run(throttle, 0, 31, 150) == {}
    assert run(throttle, 0x40, 150, 160) == {}
    assert run(throttle, 0, 160, 279) == {}
    assert run(throttle, 0, 279, 290) == {279: 0.75}


def test_bits_that_flicker_about_the_limit_count_as_hot() -> None:
    throttle = Throttle()
    changes = [now for now in range(100) if throttle.update(0x20 if now % 4 == 0 else 0, float(now))]
    assert changes == [30, 90]


def test_short_heat_is_no_reason() -> None:
    throttle = Throttle()
    for begin in range(0, 600, 60):
        assert run(throttle, 0x40, begin, begin + 20) == {}
        assert run(throttle, 0, begin + 20, begin + 60) == {}


def test_time_that_nobody_saw_counts_neither_way() -> None:
    throttle = Throttle()
    run(throttle, 0x40, 0, 20)
    assert run(throttle, 0x40, 500, 529) == {}
    assert run(throttle, 0x40, 529, 535) == {530: 0.5}
    run(throttle, 0, 535, 560)
    assert run(throttle, 0, 5000, 5119) == {}


@given(st.lists(st.tuples(st.integers(0, 0x1FF), st.floats(0, 200)), max_size=300))
def test_the_share_stays_between_a_quarter_and_all_whatever_comes(readings: list[tuple[int, float]]) -> None:
    throttle, now, seen_hot = Throttle(), 0.0, False
    for bits, gap in readings:
        now += gap
        before, seen_hot = throttle.factor, seen_hot or bool(bits & HOT_BITS)
        changed = throttle.update(bits, now)
        assert LOWEST <= throttle.factor <= 1.0
        assert changed == (throttle.factor != before)
        assert seen_hot or throttle.factor == 1.0
