"""When failures for want of memory mean that the process should be replaced."""

from __future__ import annotations

from gpupool.worker.exhaustion import ASK_AGAIN_S, FAILURES, WINDOW_S, Exhaustion

FIXED, BUDGET = 100, 1000
GROWN = 201


def begun() -> Exhaustion:
    exhaustion = Exhaustion()
    exhaustion.begin(fixed_bytes=FIXED, budget_bytes=BUDGET)
    return exhaustion


def test_failures_alone_prove_nothing() -> None:
    """Or whoever sends samples that are too large could have workers replaced."""
    exhaustion = begun()
    for second in range(1000):
        exhaustion.failed(5, FIXED + BUDGET // 10, float(second))

    assert exhaustion.recycle_reason is None
    assert exhaustion.failures == 5000


def test_failures_with_memory_lost_ask_for_a_new_process() -> None:
    exhaustion = begun()
    for second in range(FAILURES - 1):
        exhaustion.failed(1, GROWN, float(second))
    assert exhaustion.recycle_reason is None

    exhaustion.failed(1, GROWN, 10.0)

    assert exhaustion.recycle_reason is not None
    assert f"{FAILURES} times in 10 s" in exhaustion.recycle_reason


def test_failures_far_apart_do_not() -> None:
    exhaustion = begun()
    for n in range(10):
        exhaustion.failed(1, GROWN, n * WINDOW_S)

    assert exhaustion.recycle_reason is None


def test_it_is_asked_again_while_it_goes_on_but_not_each_time() -> None:
    exhaustion = begun()
    asked = []
    for second in range(100):
        exhaustion.failed(1, GROWN, float(second))
        if exhaustion.recycle_reason:
            asked.append(second)
            exhaustion.recycle_reason = None

    assert asked == list(range(2, 100, int(ASK_AGAIN_S)))


def test_before_loading_is_done_nothing_is_judged() -> None:
    exhaustion = Exhaustion()
    for second in range(10):
        exhaustion.failed(1, 1 << 40, float(second))

    assert exhaustion.recycle_reason is None
