"""What a worker's batches were, and what its own work between them cost."""

from __future__ import annotations

import pytest

from gpupool.worker.account import Turnaround

T = 1000.0


def test_the_gap_counts_before_a_full_batch_that_was_complete_when_the_last_one_ended() -> None:
    turnaround = Turnaround()
    turnaround.ran(T, 0.010, None)  # it need not be full itself

    turnaround.ran(T + 0.011, 0.020, T + 0.009)

    assert turnaround.describe() == {"pairs": 1, "gap_ms": pytest.approx(1.0), "share": pytest.approx(0.05)}


@pytest.mark.parametrize(
    ("complete_at", "why"),
    [(None, "it was not full"), (T + 0.0101, "it was still filling up"), (T + 5.0, "nothing waited for a while")],
)
def test_a_pause_in_which_no_full_batch_waited_is_none_of_ours(complete_at: float | None, why: str) -> None:
    turnaround = Turnaround()
    turnaround.ran(T, 0.010, T - 1)

    turnaround.ran(T + 5.001, 0.020, complete_at)

    assert turnaround.describe() == {"pairs": 0, "gap_ms": None, "share": None}, why


def test_the_first_batch_has_none_before_it() -> None:
    turnaround = Turnaround()
    turnaround.ran(T, 0.010, T - 1)

    assert turnaround.pairs == 0
