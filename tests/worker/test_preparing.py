"""Whose rows are preprocessed next, and who is through: no thread, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.spec import ModelSpec
from gpupool.worker.models import Model
from gpupool.worker.preparing import Preparing
from gpupool.worker.request import Request
from gpupool.worker.rows import ROWS_AT_A_TIME, SLICE_S, Rows

T = 50.0


def doubled(sample: int) -> int:
    if sample < 0:
        raise ValueError(f"{sample} is negative")
    return 2 * sample


MODEL = Model(ModelSpec("m"), forward=list, preprocess=doubled)


def request(
    ticket: int, samples: list[Any] | int = 1, *, model: int = 0, priority: int = 5, deadline: float = T + 10.0, **more: Any
) -> Request:
    samples = list(range(samples)) if isinstance(samples, int) else samples
    return Request(ticket, 1, model, len(samples) != 1, False, priority, deadline, T, samples, **more)


def preparing(*requests: Request) -> Preparing:
    core = Preparing()
    for each in requests:
        core.put(each)
    return core


def take(core: Preparing, model: int = 0, now: float = T) -> Rows:
    rows = core.take(model, now)
    assert rows is not None
    return rows


def work(core: Preparing, rows: Rows, model: Model = MODEL, clock: Callable[[], float] = lambda: T) -> None:
    rows.work(model, clock, claim=lambda now: core.claim(rows, now))


def claim(core: Preparing, rows: Rows, count: int) -> Rows:
    """Claim rows up to so many."""
    while len(rows.index) < count:
        assert core.claim(rows, T)
    return rows


def give_back(core: Preparing, *taken: Rows) -> list[Request]:
    for rows in taken:
        work(core, rows)
        core.done(rows)
    return core.collect()


def answers(core: Preparing) -> list[tuple[int, str]]:
    return [(r.ticket, "ok" if r.failure is None else str(r.failure.code)) for r in core.collect()]


def test_one_thread_keeps_the_order_of_arrival() -> None:
    core = preparing(*(request(n) for n in range(1, 6)))

    assert [give_back(core, take(core))[0].ticket for _ in range(5)] == [1, 2, 3, 4, 5]
    assert core.take(0, T) is None


def test_a_small_request_waits_for_a_few_rows_of_a_large_one_and_no_more() -> None:
    large = request(1, 10 * ROWS_AT_A_TIME)
    core = preparing(large)
    first = take(core)
    core.put(request(2))

    assert give_back(core, first) == []
    assert first.index == [*range(ROWS_AT_A_TIME)]
    assert [take(core).request.ticket for _ in range(2)] == [1, 2]


def test_rows_of_one_request_are_spread_over_threads_and_come_back_in_their_places() -> None:
    large = request(1, 100, bounds=(50,))
    core = preparing(large)
    rows = [take(core) for _ in range(4)]
    for each in rows:
        work(core, each, Model(ModelSpec("m"), forward=list, preprocess=doubled, length=int))
    for each in rows[::-1]:
        assert core.collect() == []
        core.done(each)

    assert core.collect() == [large]
    assert large.samples == [2 * n for n in range(100)]
    assert large.length == 99
    assert {bound: sorted(index) for bound, index in (large.buckets or {}).items()} == {50: [*range(51)], 0: [*range(51, 100)]}


def test_models_do_not_wait_for_each_other() -> None:
    core = preparing(request(1, 100), request(2, model=3))

    assert take(core, model=3).request.ticket == 2


def test_the_first_row_that_fails_is_told_whichever_thread_is_faster() -> None:
    samples = list(range(200))
    samples[0] = samples[4] = -1
    core = preparing(request(1, samples))
    early, late = take(core), take(core)

    assert give_back(core, late) == []  # an earlier row may still fail
    assert not core.waits(0)  # but no others are begun
    (failed,) = give_back(core, early)
    assert failed.failure is not None
    assert failed.failure.message == "sample 0: ValueError: -1 is negative"


def test_a_cancelled_request_is_answered_at_once_if_no_thread_has_it_and_else_when_it_comes_back() -> None:
    core = preparing(request(1, 100), request(2))
    rows = take(core)

    assert core.cancel(1)
    assert core.cancel(2)
    assert not core.cancel(3)
    assert answers(core) == [(2, "cancelled")]
    assert core.take(0, T) is None
    core.done(rows)
    assert answers(core) == [(1, "cancelled")]
    assert core.rows == 0


def test_what_is_past_its_deadline_is_not_begun_and_answered() -> None:
    core = preparing(request(1, deadline=T + 1), request(2, deadline=T + 5), request(3, 100, deadline=T + 2))
    begun = take(core, now=T)
    assert core.next_expiry == T + 1

    assert take(core, now=T + 3).request.ticket == 2
    core.expire(T + 3)
    assert answers(core) == [(3, "deadline_exceeded")]
    core.done(begun)
    assert answers(core) == [(1, "deadline_exceeded")]
    assert core.next_expiry == T + 5


@pytest.mark.parametrize("how", ["cancel", "deadline", "failure", "router"])
def test_no_row_is_begun_of_what_has_ended_meanwhile(how: str) -> None:
    begun: list[Any] = []

    def end_it(sample: int) -> int:
        begun.append(sample)
        if len(begun) == 3:
            match how:
                case "cancel":
                    core.cancel(1)
                case "failure":
                    assert give_back(core, other) == []
                case "router":
                    core.clear()
        return sample

    core = preparing(request(1, [-1, *range(99)], deadline=T + SLICE_S / 2))
    other = take(core)
    rows = take(core)
    clock = iter([T, T, T, T + (0.6 * SLICE_S if how == "deadline" else 0.0), *[T] * 100])
    work(core, rows, Model(ModelSpec("m"), forward=list, preprocess=end_it), lambda: next(clock))

    assert begun == [0, 1, 2]
    assert rows.failure is None


def test_a_turn_ends_after_its_time_and_after_its_rows() -> None:
    now = [T]

    def slow(sample: int) -> int:
        now[0] += SLICE_S / 3.5
        return sample

    core = preparing(request(1, 100), request(2))
    rows = take(core)
    work(core, rows, Model(ModelSpec("m"), forward=list, preprocess=slow), lambda: now[0])
    core.done(rows)

    assert rows.index == [0, 1, 2, 3]
    assert take(core).request.ticket == 2
    again = take(core)
    work(core, again)
    assert again.index == [*range(4, 4 + ROWS_AT_A_TIME)]


def test_few_rows_are_shared_evenly_by_all_threads() -> None:
    core = preparing(request(1, 8))
    rows = [take(core) for _ in range(4)]
    for each in rows:
        assert core.claim(each, T)

    assert [each.index for each in rows] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert not core.waits(0)
    assert not any(core.claim(each, T) for each in rows)


def test_the_highest_priority_goes_first_and_a_turn_of_a_large_one_does_not_hold_it_up() -> None:
    core = preparing(request(1, 100), request(2), request(3, priority=7))

    assert take(core).request.ticket == 3
    assert take(core).request.ticket == 1
    core.put(request(4, 2, priority=15))
    assert [take(core).request.ticket for _ in range(4)] == [4, 4, 2, 1]


def test_a_stop_gives_back_what_no_thread_has_had_and_nothing_else() -> None:
    core = preparing(*(request(n) for n in range(1, 6)), request(6, 100), request(7, priority=0))
    ready = take(core)
    work(core, ready)
    core.done(ready)  # through, and not collected
    rows = take(core)
    core.cancel(3)
    large = [take(core) for _ in range(3)][-1]
    assert large.request.ticket == 6

    assert core.untouched() == [7]
    assert core.rows == 105
    assert core.waits(0)  # the rest of 6
    assert sorted(answers(core)) == [(1, "ok"), (3, "cancelled")]
    assert [r.ticket for r in give_back(core, rows)] == [2]
    assert (core.rows, core.untouched()) == (102, [])


def test_what_was_forgotten_is_dropped_when_it_comes_back() -> None:
    core = preparing(request(1, 100), request(2))
    rows = take(core)

    core.clear()
    core.put(request(1))  # none of another router's has the same ticket; if it had, it would be another request
    assert give_back(core, rows) == []
    assert (core.rows, core.through) == (1, False)
    assert [r.ticket for r in give_back(core, take(core))] == [1]


def test_preprocessing_takes_no_longer_than_it_took_however_many_threads_were_at_it() -> None:
    large = request(1, 2 * ROWS_AT_A_TIME)
    core = preparing(large)
    for rows, ended in ((take(core), T + 2.0), (take(core), T + 3.0)):
        rows.began, rows.ended = T + 1.0, ended
        core.done(rows)

    assert large.preprocess_s == 2.0


_DEED = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 1), st.integers(1, 100), st.integers(1, 20)),
    st.tuples(st.just("put"), st.just(0), st.integers(1, 100), st.integers(1, 20)),
    st.tuples(st.just("take"), st.integers(0, 1), st.just(0), st.just(0)),
    st.tuples(st.just("done"), st.integers(0, 7), st.booleans(), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(1, 40), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 5), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["collect", "collect", "clear", "untouched"]), st.just(0), st.just(0), st.just(0)),
)


@given(st.lists(_DEED, max_size=60))
def test_every_request_comes_out_exactly_once_whatever_comes_together(deeds: list[tuple[str, int, int, int]]) -> None:
    core = Preparing()
    now, made, taken = T, 0, []
    deadlines: dict[int, float] = {}
    sizes: dict[int, int] = {}
    out: Counter[int] = Counter()
    had: set[int] = set()  # by a thread

    def collect() -> None:
        core.expire(now)
        for each in core.collect():
            out[each.ticket] += 1
            assert not each.in_hand
            if each.failure is None:
                assert each.samples == [2 * n for n in range(sizes[each.ticket])]
            elif each.failure.code == "deadline_exceeded":
                assert deadlines[each.ticket] <= now

    for what, a, b, c in deeds:
        if what == "put":
            made += 1
            sizes[made], deadlines[made] = b, now + c
            core.put(request(made, b, model=a, deadline=now + c))
        elif what == "take":
            if (rows := core.take(a, now)) is not None:
                assert rows.request.deadline > now
                taken.append(rows)
                had.add(rows.request.ticket)
        elif what == "done" and taken:
            rows = taken.pop(a % len(taken))
            if b:
                rows.request.samples[rows.index[-1]] = -1
            work(core, rows, clock=partial(float, now))
            core.done(rows)
        elif what == "cancel":
            core.cancel(a)
        elif what == "wait":
            now += a
        elif what == "clear":
            core.clear()
            out.update(sizes.keys() - out.keys())
        elif what == "untouched":
            for ticket in core.untouched():
                assert ticket not in had
                out[ticket] += 1
        elif what == "collect":
            collect()
        assert core.rows == sum(size for ticket, size in sizes.items() if not out[ticket])
        assert core.next_expiry <= min((r.deadline for r in core._requests.values() if r.failure is None), default=math.inf)

    while taken or core.waits(0) or core.waits(1):
        taken += [rows for model in (0, 1) if (rows := core.take(model, now)) is not None]
        if taken:
            rows = taken.pop()
            work(core, rows, clock=partial(float, now))
            core.done(rows)
    collect()
    assert out == Counter(range(1, made + 1))
    assert core.rows == 0
