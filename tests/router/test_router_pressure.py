"""Pressure: nearly full for a while, with dips; over when it has not been so for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpupool.router.pressure import DIP_S, HIGH, HOLD_S, LOW, RELEASE_S, Pressure


def feed(pressure: Pressure, fullness: float, begin: float, seconds: float, every: float = 0.1) -> list[bool]:
    return [pressure.update(fullness, begin + n * every) for n in range(round(seconds / every) + 1)]


def test_a_burst_is_no_pressure() -> None:
    pressure = Pressure()
    assert not any(feed(pressure, 1.0, 0.0, HOLD_S - 0.1))
    assert not any(feed(pressure, 0.0, HOLD_S, 10.0))


def test_nearly_full_for_a_while_is_pressure() -> None:
    pressure = Pressure()
    assert feed(pressure, HIGH, 0.0, 1.5)[-1]
    assert pressure.at(1.6)


def test_less_than_nearly_full_is_none_for_ever() -> None:
    assert not any(feed(Pressure(), HIGH - 0.01, 0.0, 100.0))


def test_dips_do_not_interrupt_it() -> None:
    """With a small queue each batch that is sent leaves it half empty for a moment."""
    pressure = Pressure()
    for n in range(20):
        pressure.update(1.0 if n % 2 else 0.3, n * DIP_S * 0.45)
    assert pressure.at(19 * DIP_S * 0.45)


def test_two_bursts_apart_are_two_bursts() -> None:
    pressure = Pressure()
    for n in range(20):
        assert not any(feed(pressure, 1.0, n * 2.0, 0.5))


def test_it_is_over_when_it_was_less_for_a_while_and_not_before() -> None:
    pressure = Pressure()
    feed(pressure, 1.0, 0.0, 2.0)
    assert all(feed(pressure, LOW, 2.0, 20.0))
    assert all(feed(pressure, LOW - 0.1, 22.1, RELEASE_S - 0.2))
    assert not pressure.at(22.0 + RELEASE_S + 0.1)
    assert not pressure.update(1.0, 30.0)


def test_a_stretch_that_nobody_looked_at_does_not_count() -> None:
    pressure = Pressure()
    assert not pressure.update(1.0, 0.0)
    assert not pressure.update(1.0, 60.0)


@given(st.lists(st.tuples(st.floats(0.0, 1.2), st.floats(0.001, 0.4)), max_size=60))
def test_it_never_begins_before_its_time_nor_ends_before(looks: list[tuple[float, float]]) -> None:
    pressure, now, high_since, low_at, before = Pressure(), 0.0, None, float("-inf"), False
    last_high = float("-inf")
    for fullness, wait in looks:
        now += wait
        if fullness >= HIGH:
            high_since = now if high_since is None or now > last_high + DIP_S else high_since
            last_high = now
        low_at = now if fullness >= LOW else low_at
        on = pressure.update(fullness, now)
        if on and not before:
            assert high_since is not None
            assert now >= high_since + HOLD_S
        if before and not on:
            assert now > low_at + RELEASE_S
        before = on
