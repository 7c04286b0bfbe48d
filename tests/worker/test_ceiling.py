"""The memory ceiling of batches."""

from __future__ import annotations

from gpupool.worker.ceiling import PATIENCE, Ceilings

KEY = (0, 0)


def succeed(ceilings: Ceilings, rows: int, times: int, most: int = 32) -> int:
    return sum(ceilings.succeeded(KEY, rows, most=most) for _ in range(times))


def test_there_is_no_ceiling_until_memory_was_short() -> None:
    ceilings = Ceilings()

    assert not succeed(ceilings, 32, 1000)
    assert ceilings.limit(KEY) is None
    assert ceilings.lowest() is None


def test_a_failure_halves_at_once_and_is_remembered_for_its_bucket_only() -> None:
    ceilings = Ceilings()

    assert ceilings.failed(KEY, 8) == 4
    assert ceilings.limit(KEY) == 4
    assert ceilings.limit((0, 1)) is None
    assert ceilings.lowest() == 4


def test_a_failure_never_raises_the_ceiling_nor_takes_it_below_one() -> None:
    ceilings = Ceilings()
    ceilings.failed(KEY, 8)

    assert ceilings.failed(KEY, 32) == 4
    assert ceilings.failed(KEY, 2) == 1
    assert ceilings.failed(KEY, 2) == 1


def test_the_ceiling_rises_by_one_after_enough_full_batches() -> None:
    ceilings = Ceilings()
    ceilings.failed(KEY, 8)

    assert succeed(ceilings, 4, PATIENCE - 1) == 0
    assert succeed(ceilings, 4, 1) == 1
    assert ceilings.limit(KEY) == 5


def test_small_batches_prove_nothing() -> None:
    ceilings = Ceilings()
    ceilings.failed(KEY, 8)

    assert succeed(ceilings, 3, 10 * PATIENCE) == 0


def test_a_raise_that_fails_goes_back_to_what_fits_and_doubles_the_patience() -> None:
    ceilings = Ceilings()
    ceilings.failed(KEY, 8)
    succeed(ceilings, 4, PATIENCE)

    assert ceilings.failed(KEY, 5) == 4
    assert succeed(ceilings, 4, 2 * PATIENCE - 1) == 0
    assert succeed(ceilings, 4, 1) == 1


def test_a_size_that_used_to_fit_and_does_not_any_more_is_halved() -> None:
    ceilings = Ceilings()
    ceilings.failed(KEY, 16)
    succeed(ceilings, 8, 3)

    assert ceilings.failed(KEY, 8) == 4


def test_at_the_configured_batch_the_ceiling_is_forgotten() -> None:
    ceilings = Ceilings()
    ceilings.failed(KEY, 4)
    succeed(ceilings, 2, PATIENCE, most=4)
    succeed(ceilings, 3, PATIENCE, most=4)
    succeed(ceilings, 4, PATIENCE, most=4)

    assert ceilings.limit(KEY) is None
