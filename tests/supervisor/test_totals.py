"""Counts over restarts."""

from __future__ import annotations

from gpupool.supervisor.totals import Totals


def test_a_count_goes_on_over_restarts() -> None:
    totals = Totals()
    totals.update(0, 3)
    totals.update(0, 5)
    totals.ended(0)
    assert totals.of(0) == 5

    totals.update(0, 1)
    totals.update(1, 7)
    assert (totals.of(0), totals.of(1), totals.of(2)) == (6, 7, 0)


def test_a_process_that_ends_without_a_report_takes_nothing_along() -> None:
    totals = Totals()
    totals.update(0, 3)
    totals.ended(0)
    totals.ended(0)

    assert totals.of(0) == 3
