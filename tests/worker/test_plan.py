"""The line through measured peaks, what to measure next, and what follows for batches and pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.worker.plan import GOOD, NEAR, NOISE_BYTES, GroupPlan, MemoryPlan, Peak, fill_gaps, fitted, next_size

MIB = 1 << 20


def peaks(scratch: int, each: int, *rows: int) -> tuple[Peak, ...]:
    return tuple(Peak(n, scratch + n * each) for n in rows)


def test_a_straight_line_is_found() -> None:
    line = fitted(peaks(50 * MIB, 8 * MIB, 1, 2, 4))

    assert (line.scratch_bytes, line.per_sample_bytes, line.error) == (50 * MIB, 8 * MIB, 0.0)
    assert line.ceiling(50 * MIB + 11 * 8 * MIB + 1) == 11


def test_scratch_is_never_below_nothing() -> None:
    line = fitted([Peak(1, MIB), Peak(2, 4 * MIB), Peak(4, 16 * MIB)])

    assert line.scratch_bytes == 0
    assert line.error > GOOD


def test_one_point_is_taken_for_samples_alone() -> None:
    assert fitted(peaks(0, 8 * MIB, 1)).peak(4) == 32 * MIB


def test_samples_that_cost_nothing_have_no_ceiling() -> None:
    assert fitted(peaks(5 * MIB, 0, 1, 2, 4)).ceiling(MIB) is None


def test_one_sample_is_always_let_through() -> None:
    """Whether it fits is for the device to say."""
    assert fitted(peaks(0, 8 * MIB, 1, 2, 4)).ceiling(-MIB) == 1


def sizes(scratch: int, each: int, *, most: int, room: int) -> list[int]:
    tried: list[Peak] = []
    while (rows := next_size(tried, most=most, room_bytes=room)) is not None:
        tried.append(Peak(rows, scratch + rows * each))
    return [p.rows for p in tried]


def test_sizes_double_until_the_line_is_good() -> None:
    assert sizes(MIB, 8 * MIB, most=32, room=1 << 30) == [1, 2, 4]


def test_peaks_that_drown_in_noise_are_measured_further() -> None:
    assert sizes(0, 1000, most=32, room=1 << 30) == [1, 2, 4, 8, 16, 32]


def test_nothing_larger_than_the_configured_batch_is_run() -> None:
    assert sizes(0, 8 * MIB, most=3, room=1 << 30) == [1, 2, 3]
    assert sizes(0, 8 * MIB, most=1, room=1 << 30) == [1]


@given(
    scratch=st.integers(0, 1 << 30), each=st.integers(1, 1 << 28), most=st.integers(1, 4096), room=st.integers(1, 1 << 33)
)  # fmt: skip
def test_no_size_is_tried_that_would_come_near_the_budget(scratch: int, each: int, most: int, room: int) -> None:
    for rows in sizes(scratch, each, most=most, room=room)[1:]:
        assert scratch + rows * each <= NEAR * room + rows  # the line is rounded to whole bytes


@given(scratch=st.integers(0, 1 << 28), each=st.integers(4 * NOISE_BYTES, 1 << 27), most=st.integers(3, 512))
def test_what_is_planned_fits_and_one_more_does_not(scratch: int, each: int, most: int) -> None:
    room = scratch + 600 * each + each // 2
    tried = [Peak(n, scratch + n * each) for n in sizes(scratch, each, most=most, room=room)]

    assert GroupPlan(tuple(tried)).ceiling(room) == 600


def test_a_size_that_failed_while_measured_is_above_the_ceiling() -> None:
    assert GroupPlan(peaks(0, MIB, 1, 2, 4), failed_at=8).ceiling(1 << 30) == 7
    assert GroupPlan(peaks(0, 0, 1, 2, 4), failed_at=8).ceiling(1 << 30) == 7
    assert GroupPlan(peaks(0, MIB, 1), failed_at=2).ceiling(1 << 30) == 1


def test_a_bucket_without_samples_goes_by_the_next_longer_one() -> None:
    short, long = GroupPlan(peaks(0, MIB, 1)), GroupPlan(peaks(0, 8 * MIB, 1))

    filled = fill_gaps(3, (16, 32, 64), {(3, 16): short, (3, 64): long})

    assert filled == {(3, 64): long, (3, 32): long, (3, 16): short}


def test_the_unbounded_bucket_is_the_longest() -> None:
    long = GroupPlan(peaks(0, 8 * MIB, 1))

    assert fill_gaps(0, (16,), {(0, 0): long}) == {(0, 0): long, (0, 16): long}


def test_the_ceilings_follow_the_budget() -> None:
    plan = MemoryPlan(100 * MIB, {(0, 0): GroupPlan(peaks(4 * MIB, 8 * MIB, 1, 2, 4)), (1, 0): GroupPlan(peaks(0, 0, 1, 2))})

    assert plan.ceilings(192 * MIB) == {(0, 0): 11}
    assert plan.ceilings(280 * MIB) == {(0, 0): 22}


@pytest.mark.parametrize(("budget", "pool"), [(1000 * MIB, int(84 * MIB * 1.2)), (150 * MIB, 50 * MIB), (50 * MIB, 0)])
def test_the_pool_is_the_largest_peak_with_a_margin_within_the_budget(budget: int, pool: int) -> None:
    plan = MemoryPlan(
        100 * MIB, {(0, 16): GroupPlan(peaks(4 * MIB, MIB, 1, 2, 4)), (0, 32): GroupPlan(peaks(4 * MIB, 8 * MIB, 1, 2))}
    )

    assert plan.pool_bytes({(0, 16): 32, (0, 32): 10}, budget) == pool
