"""What is called a leak: steady growth is, soon; what only looks like it is not. Histories are made up, hours of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.board import Phase, SlotRecord
from gpupool.supervisor import events as ev
from gpupool.supervisor.leak import CELLS, WARM_UP_CELLS, LeakPolicy, Trend
from gpupool.supervisor.leak_watch import LeakWatch, memory_held
from support import memory_series as series
from support.memory_series import MIB

SEEDS = st.integers(0, 1 << 32)
#: One second a cell, a mebibyte a second.
QUICK = LeakPolicy(bytes_per_hour=3600 * MIB, window_s=float(CELLS))


@pytest.mark.parametrize("name", series.HARMLESS)
def test_what_only_looks_like_a_leak_raises_no_alarm(name: str) -> None:
    """Of many more histories than these one raises one: the demonstration `leak-watch` counts them."""
    for seed in range(12):
        rng = random.Random(seed)
        assert series.watch(series.HARMLESS[name](rng), rng, hours=12).alarm_h is None, f"seed {seed}"


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(SEEDS, st.floats(70, 2000), st.sampled_from([series.leak, series.leak_by_requests]))
def test_a_leak_above_the_limit_is_told_within_a_window_and_a_half(
    seed: int, rate: float, shape: Callable[[random.Random, float], series.Shape]
) -> None:
    rng = random.Random(seed)

    outcome = series.watch(shape(rng, rate), rng, hours=3)

    assert outcome.alarm_h is not None
    assert outcome.alarm_h < 1.6
    assert outcome.at_the_end


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(SEEDS, st.floats(0, 45))
def test_a_leak_well_below_the_limit_is_none(seed: int, rate: float) -> None:
    rng = random.Random(seed)

    assert series.watch(series.leak(rng, rate), rng, hours=6).alarm_h is None


def run(trend: Trend, seconds: int, per_s: float, *, at: float = 0.0, work: bool = True, held: float = 100.0) -> list[float]:
    """Let memory grow by so many MiB a second; returns when the verdict changed."""
    changes = []
    for n in range(4 * seconds):
        t = at + n / 4
        if trend.observe(int((held + per_s * n / 4) * MIB), int(10 * t) if work else 0, t):
            changes.append(t)
    return changes


def test_growth_is_counted_from_the_end_of_warm_up() -> None:
    trend = Trend(QUICK)

    (alarm,) = run(trend, 60, 2.0)

    assert alarm == WARM_UP_CELLS + CELLS
    assert trend.suspected
    assert trend.slope
    assert trend.slope.bytes_per_hour == pytest.approx(2 * 3600 * MIB)
    assert trend.slope.growth_bytes == pytest.approx(2 * (59 - WARM_UP_CELLS) * MIB, abs=5 * MIB)


def test_growth_without_work_is_not_judged() -> None:
    trend = Trend(QUICK)

    assert not run(trend, 200, 2.0, work=False)
    assert trend.slope is None


def test_an_alarm_ends_when_the_growth_ends() -> None:
    trend = Trend(QUICK)
    run(trend, 60, 2.0)

    assert len(run(trend, 60, 0.0, at=60.0, held=220.0)) == 1
    assert not trend.suspected


def test_a_limit_of_nothing_is_never_reached() -> None:
    assert not run(Trend(replace(QUICK, bytes_per_hour=0)), 100, 50.0)


def test_a_pause_of_the_host_is_left_out() -> None:
    """What happened meanwhile nobody saw: neither its growth nor its time counts."""
    trend = Trend(QUICK)
    run(trend, 20, 2.0)
    assert len(run(trend, 60, 2.0, at=1000.0, held=140.0)) == 1
    assert trend.slope
    assert trend.slope.bytes_per_hour == pytest.approx(2 * 3600 * MIB, rel=0.1)


def test_what_is_kept_is_bounded() -> None:
    trend = Trend(QUICK)
    run(trend, 1000, 0.1)
    assert len(trend._floors) == len(trend._work) == CELLS


def watch_for(watch: LeakWatch, seconds: int, *, incarnation: int = 1, at: float = 0.0, per_s: int = 2) -> list[ev.LeakJudged]:
    found: list[ev.Event] = []
    for n in range(4 * seconds):
        t = at + n / 4
        held = {"host": 100 * MIB, "device": int((100 + per_s * n / 4) * MIB)}
        found += watch.observe(3, incarnation, held, int(10 * t), t)
    return [event for event in found if isinstance(event, ev.LeakJudged)]


def test_each_kind_of_memory_is_judged_by_itself_and_a_new_process_begins_anew() -> None:
    watch = LeakWatch(QUICK)

    (told,) = watch_for(watch, 60)
    view = watch.view(3, 1)

    assert (told.slot, told.incarnation, told.kind, told.suspected) == (3, 1, "device", True)
    assert {kind: leak["suspected"] for kind, leak in view.items()} == {"host": False, "device": True}
    assert not watch_for(watch, 30, incarnation=2, at=60.0)
    assert watch.view(3, 1) == watch.view(3, 2) == {}


def test_other_rules_forget_what_was_suspected_by_the_old_ones() -> None:
    watch = LeakWatch(QUICK)
    watch_for(watch, 60)

    assert not watch.set_policy(QUICK)
    (over,) = watch.set_policy(replace(QUICK, bytes_per_hour=1 << 40))

    assert isinstance(over, ev.LeakJudged)
    assert (over.kind, over.suspected) == ("device", False)
    assert not watch_for(watch, 60, at=60.0)


def test_looks_are_as_often_as_the_window_asks_for_and_none_when_turned_off() -> None:
    watch = LeakWatch(LeakPolicy(1, window_s=3200.0))
    assert [watch.is_due(t) for t in (1.0, 2.0, 5.9, 6.1)] == [True, False, False, True]
    assert not LeakWatch(LeakPolicy(bytes_per_hour=0)).is_due(1.0)


def test_what_cannot_be_told_is_not_watched() -> None:
    record = SlotRecord(1, 2, Phase.IDLE, *[0] * 14)
    assert memory_held(record, {}) == {}
    assert memory_held(replace(record, memory_bytes=7), {"memory": {"allocated_bytes": 9}}) == {"host": 7, "device": 9}
