"""Whether waiting for company pays."""

from __future__ import annotations

import pytest

from gpupool.worker.fit import BatchFit
from gpupool.worker.window import ArrivalGaps, worthwhile_wait

LONGEST = 0.001


def fitted(fixed_s: float, per_sample_s: float = 0.0001) -> BatchFit:
    fit = BatchFit()
    for n in range(40):
        fit.add(1 + n % 8, fixed_s + per_sample_s * (1 + n % 8))
    return fit


def gaps_of(*gaps: float, times: int = 40) -> ArrivalGaps:
    arrivals, now = ArrivalGaps(LONGEST), 100.0
    arrivals.add(now)
    for _ in range(times):
        for gap in gaps:
            now += gap
            arrivals.add(now)
    return arrivals


def test_without_evidence_the_full_window_holds() -> None:
    assert worthwhile_wait(1, LONGEST, BatchFit(), gaps_of(0.0002)) == LONGEST
    assert worthwhile_wait(1, LONGEST, fitted(0.002), ArrivalGaps(LONGEST)) == LONGEST


def test_dense_arrivals_and_a_dear_batch_are_worth_the_window() -> None:
    assert worthwhile_wait(2, LONGEST, fitted(0.005), gaps_of(0.0001)) == LONGEST


def test_a_lone_client_never_waits() -> None:
    batch_s = 0.02
    assert worthwhile_wait(1, LONGEST, fitted(batch_s, 0.0), gaps_of(batch_s + 0.0003)) == 0.0


def test_a_lone_client_of_a_fast_model_never_waits() -> None:
    # Its requests come within the window of each other, yet never while one waits: a batch costs less than a round trip.
    assert worthwhile_wait(1, LONGEST, fitted(0.0003, 0.0), gaps_of(0.0005)) == 0.0


def test_a_cheap_batch_is_not_waited_for() -> None:
    assert worthwhile_wait(3, LONGEST, fitted(0.00002), gaps_of(0.0001)) == 0.0


def test_the_more_wait_the_less_it_pays() -> None:
    fit, gaps = fitted(0.002), gaps_of(0.0005)

    assert worthwhile_wait(1, LONGEST, fit, gaps) > 0.0
    assert worthwhile_wait(7, LONGEST, fit, gaps) == 0.0


def test_the_wait_never_costs_more_than_it_can_save() -> None:
    fit, gaps = fitted(0.0009), gaps_of(0.0001)

    assert worthwhile_wait(3, LONGEST, fit, gaps) == pytest.approx(0.0009 / 3)


def test_clients_that_ask_together_are_waited_for_although_the_mean_gap_is_long() -> None:
    burst = gaps_of(0.00005, 0.00005, 0.00005, 0.02)

    assert worthwhile_wait(1, LONGEST, fitted(0.02), burst) == LONGEST


def test_one_quiet_night_does_not_spoil_the_estimate() -> None:
    gaps = gaps_of(0.0001)
    before = gaps.gap_s
    gaps.add(1e6)

    assert gaps.gap_s < before + LONGEST / 4
