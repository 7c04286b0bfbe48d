"""The memory ceiling of batches."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, ItemsView

from gpupool.worker.ceiling import PATIENCE, STEP_AFTER, Ceilings

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


def test_a_planned_ceiling_is_approached_from_its_share_in_steps() -> None:
    ceilings = Ceilings()
    ceilings.plan({KEY: 40}, 0.7)
    assert ceilings.limit(KEY) == 28

    assert succeed(ceilings, 28, STEP_AFTER - 1, most=64) == 0
    assert succeed(ceilings, 28, 1, most=64) == 1
    assert ceilings.limit(KEY) == 32
    succeed(ceilings, 32, STEP_AFTER, most=64)
    succeed(ceilings, 36, STEP_AFTER, most=64)
    assert ceilings.limit(KEY) == 40


def test_above_the_plan_the_search_is_slow() -> None:
    ceilings = Ceilings()
    ceilings.plan({KEY: 4}, 1.0)

    assert succeed(ceilings, 4, PATIENCE - 1) == 0
    assert succeed(ceilings, 4, 1) == 1
    assert ceilings.limit(KEY) == 5


def test_a_planned_ceiling_rises_no_further_than_the_configured_batch_and_stays_known() -> None:
    ceilings = Ceilings()
    ceilings.plan({KEY: 10}, 1.0)

    assert succeed(ceilings, 8, 10 * PATIENCE, most=8) == 0
    assert ceilings.limit(KEY) == 10


def test_after_a_failure_the_plan_is_not_trusted() -> None:
    ceilings = Ceilings()
    ceilings.plan({KEY: 20}, 0.5)
    succeed(ceilings, 10, STEP_AFTER)
    assert ceilings.failed(KEY, 12) == 10

    assert succeed(ceilings, 10, PATIENCE) == 0  # the failed raise has doubled the patience
    assert succeed(ceilings, 10, PATIENCE) == 1


def test_what_used_to_fit_is_approached_again_faster_than_the_unknown() -> None:
    ceilings = Ceilings()
    ceilings.failed(KEY, 32)
    succeed(ceilings, 16, 1)
    assert ceilings.failed(KEY, 16) == 8

    assert succeed(ceilings, 8, STEP_AFTER) == 1
    assert ceilings.limit(KEY) == 9


def test_a_larger_budget_raises_the_limit_at_once_and_a_smaller_one_cuts_it() -> None:
    ceilings = Ceilings()
    ceilings.plan({KEY: 10}, 0.7)
    ceilings.plan({KEY: 100}, 0.7)
    assert ceilings.limit(KEY) == 70

    ceilings.plan({KEY: 50}, 0.7)
    assert ceilings.limit(KEY) == 50
    ceilings.plan({KEY: 60}, 0.7)
    assert ceilings.limit(KEY) == 50


def test_a_new_budget_without_a_plan_has_the_ceiling_probed_afresh() -> None:
    ceilings = Ceilings()
    ceilings.failed(KEY, 8)
    succeed(ceilings, 4, PATIENCE)
    ceilings.failed(KEY, 5)  # patience has doubled

    ceilings.plan({}, 0.7)

    assert succeed(ceilings, 4, PATIENCE) == 1


def test_the_lowest_ceiling_is_that_of_the_poorest_models_roomiest_bucket() -> None:
    ceilings = Ceilings()
    ceilings.plan({(0, 16): 64, (0, 256): 4, (1, 0): 48}, 1.0)

    assert ceilings.lowest() == 48


def meanwhile(act: Callable[[], object]) -> threading.Thread:
    """Let another thread act now, as far as it can: it is waited for, but not for ever, since it may have to wait for us."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(0.5)
    return thread


class ReadMeanwhile(UserDict[tuple[int, int], int]):
    """A new plan during whose reading another thread acts."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__({(1, 0): 50})
        self._act = act

    def items(self) -> ItemsView[tuple[int, int], int]:
        self.thread = meanwhile(self._act)
        return super().items()


class ComparedMeanwhile(int):
    """A batch's size during whose comparison another thread acts."""

    act: Callable[[], object]

    def __le__(self, other: int) -> bool:
        self.thread = meanwhile(self.act)
        return int(self) <= other


def test_what_a_batch_teaches_while_a_new_plan_is_put_into_force_is_kept() -> None:
    ceilings = Ceilings(threading.RLock())
    plan = ReadMeanwhile(lambda: ceilings.failed(KEY, 8))

    ceilings.plan(plan, 1.0)
    plan.thread.join()

    assert ceilings.limits() == {KEY: 4, (1, 0): 50}


def test_what_a_batch_makes_forgotten_while_a_new_plan_is_put_into_force_stays_forgotten() -> None:
    ceilings = Ceilings(threading.RLock())
    ceilings.failed(KEY, 8)
    plan = ReadMeanwhile(lambda: succeed(ceilings, 4, PATIENCE, most=4))

    ceilings.plan(plan, 1.0)
    plan.thread.join()

    assert ceilings.limits() == {(1, 0): 50}


def test_a_plan_that_comes_while_a_batch_teaches_goes_on_from_what_was_taught() -> None:
    ceilings = Ceilings(threading.RLock())
    ceilings.plan({KEY: 20}, 1.0)
    rows = ComparedMeanwhile(20)
    rows.act = lambda: ceilings.plan({KEY: 30}, 0.1)

    assert ceilings.failed(KEY, rows) == 10
    rows.thread.join()

    assert ceilings.limits() == {KEY: 10}
