"""How fast a worker has been of late."""

from __future__ import annotations

import pytest

from gpupool.worker.fit import BatchFit
from gpupool.worker.service import Service


def test_the_first_batch_counts_only_until_the_second() -> None:
    service, fit = Service(), BatchFit()
    service.ran(1, 5.0, 8, fit)
    assert service.per_sample_s == 5.0

    service.ran(4, 0.020, 8, fit)

    assert service.per_sample_s == pytest.approx(0.005)
    assert service.full_row_s == 0.0


def test_full_batches_are_foretold_while_most_samples_have_a_good_fit() -> None:
    service, good, poor = Service(), BatchFit(), BatchFit()
    for n in range(40):
        good.add(1 + n % 4, 0.008 + 0.001 * (1 + n % 4))
        service.ran(2, 0.010, 16, good)
        assert good.good or service.full_row_s == 0.0

    assert service.full_row_s == pytest.approx(0.024 / 16)
    service.ran(1, 0.5, 16, poor)
    assert service.full_row_s == pytest.approx(0.024 / 16), "one batch of another model changes nothing"
    for _ in range(20):
        service.ran(2, 0.5, 16, poor)
    assert service.full_row_s == 0.0
