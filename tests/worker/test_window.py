"""Whether waiting for company pays."""

from __future__ import annotations

import pytest

from gpupool.spec import BatchingSpec
from gpupool.worker.fit import BatchFit
from gpupool.worker.window import ArrivalGaps, Feedback, Gap, longest_s, worthwhile_wait

LONGEST = 0.001


def fitted(fixed_s: float, per_sample_s: float = 0.0001) -> BatchFit:
    fit = BatchFit()
    for n in range(40):
        fit.add(1 + n % 8, fixed_s + per_sample_s * (1 + n % 8))
    return fit


def gap_of(*gaps: float, times: int = 40) -> Gap:
    gap = Gap()
    for _ in range(times):
        for seconds in gaps:
            gap.add(seconds, LONGEST)
    return gap


POLICY = BatchingSpec(max_batch=32, min_batch=8, window_ms=5.0, idle_window_ms=1.0)


def test_from_min_batch_on_the_longer_window_counts_as_far_as_batches_fill_up() -> None:
    assert longest_s(7, POLICY, 1.0) == 0.001
    assert longest_s(8, POLICY, 1.0) == 0.005
    assert longest_s(8, POLICY, 0.5) == 0.003
    assert longest_s(8, POLICY, 0.0) == 0.001


def test_full_batches_lengthen_the_window_and_those_far_below_the_limit_shorten_it() -> None:
    feedback = Feedback()
    for _ in range(3):
        feedback.ran(7, 32)
    assert feedback.share == 1 / 8
    feedback.ran(8, 32)
    assert feedback.share == 1 / 8, "neither far below nor full"
    for _ in range(5):
        feedback.ran(1, 32)
    assert feedback.share == 0.0
    for _ in range(4):
        feedback.ran(32, 32)
    assert feedback.share == 1.0


def test_a_limit_of_one_is_always_full() -> None:
    feedback = Feedback()
    feedback.ran(1, 1)
    assert feedback.share == 1.0


def test_dense_arrivals_and_a_dear_batch_are_worth_the_window() -> None:
    assert worthwhile_wait(2, LONGEST, fitted(0.005), gap_of(0.0001)) == LONGEST


def test_a_lone_client_never_waits() -> None:
    batch_s = 0.02
    assert worthwhile_wait(1, LONGEST, fitted(batch_s, 0.0), gap_of(batch_s + 0.0003)) == 0.0


def test_a_lone_client_of_a_fast_model_never_waits() -> None:
    # Its requests come within the window of each other, yet never while one waits: a batch costs less than a round trip.
    assert worthwhile_wait(1, LONGEST, fitted(0.0003, 0.0), gap_of(0.0005)) == 0.0


def test_a_cheap_batch_is_not_waited_for() -> None:
    assert worthwhile_wait(3, LONGEST, fitted(0.00002), gap_of(0.0001)) == 0.0


def test_the_more_wait_the_less_it_pays() -> None:
    fit, gap = fitted(0.002), gap_of(0.0005)

    assert worthwhile_wait(1, LONGEST, fit, gap) > 0.0
    assert worthwhile_wait(7, LONGEST, fit, gap) == 0.0


def test_the_wait_never_costs_more_than_it_can_save() -> None:
    assert worthwhile_wait(3, LONGEST, fitted(0.0009), gap_of(0.0001)) == pytest.approx(0.0009 / 3)


def test_arrivals_that_seldom_come_in_time_are_waited_for_only_when_a_batch_is_dear() -> None:
    seldom = gap_of(0.0001, 1.0, 1.0, 1.0)

    assert worthwhile_wait(1, LONGEST, fitted(0.02), seldom) == LONGEST
    assert worthwhile_wait(1, LONGEST, fitted(0.002), seldom) == 0.0


def test_one_quiet_night_does_not_spoil_the_estimate() -> None:
    gap = gap_of(0.0001)
    before = gap.mean_s
    gap.add(1e6, LONGEST)

    assert gap.mean_s < before + LONGEST / 4


def test_gaps_are_kept_apart_by_who_waited() -> None:
    gaps, now = ArrivalGaps(POLICY), 100.0
    for _ in range(20):  # two clients, answered and asking again together
        gaps.add(now, 1)
        gaps.add(now + 0.0001, 2)
        now += 0.02

    assert gaps.after(1).share == 1.0
    assert gaps.after(2).share == 0.0
    assert not gaps.after(3).known


def test_gaps_behind_a_batch_are_kept_apart_and_begin_at_its_end() -> None:
    gaps, now = ArrivalGaps(POLICY), 100.0
    for _ in range(20):  # one waits while another is served, who asks again a moment later
        gaps.add(now, 1)
        gaps.freed(now + 0.01, 1)
        assert gaps.after(1).share in (0.0, 1.0)
        gaps.add(now + 0.0102, 2)
        now += 0.02

    gaps.add(now, 1)
    assert not gaps.after(1).known
    gaps.freed(now + 0.01, 1)
    assert gaps.after(1).share == 1.0
    assert gaps.after(1).mean_s == pytest.approx(0.0002)


def test_what_was_seldom_seen_is_told_by_its_like() -> None:
    gaps, now = ArrivalGaps(POLICY), 100.0
    for waiting in range(8, 17):
        gaps.add(now, waiting)
        now += 0.001

    assert gaps.after(11).known
    assert gaps.after(11).mean_s == pytest.approx(0.001)
    assert not gaps.after(20).known


def test_gaps_of_full_queues_are_not_kept() -> None:
    gaps = ArrivalGaps(POLICY)
    for n in range(1000):
        gaps.add(n, 32 + n)

    assert not gaps.after(40).count
