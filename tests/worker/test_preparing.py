"""Whose rows are preprocessed next, and who is through: no thread, no clock."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpupool.spec import ModelSpec
from gpupool.worker.models import Model
from gpupool.worker.preparing import Preparing
from gpupool.worker.request import Request
from gpupool.worker.rows import ROWS_AT_A_TIME, Rows

T = 50.0


def doubled(sample: int) -> int:
    if sample < 0:
        raise ValueError(f"{sample} is negative")
    return 2 * sample


MODEL = Model(ModelSpec("m"), forward=list, preprocess=doubled)


def request(ticket: int, samples: list[Any] | int = 1, *, model: int = 0, deadline: float = T + 10.0, **more: Any) -> Request:
    samples = list(range(samples)) if isinstance(samples, int) else samples
    return Request(ticket, 1, model, len(samples) != 1, False, 5, deadline, T, samples, **more)


def preparing(*requests: Request) -> Preparing:
    core = Preparing()
    for each in requests:
        core.put(each)
    return core


def take(core: Preparing, model: int = 0, now: float = T) -> Rows:
    rows = core.take(model, now)
    assert rows is not None
    return rows


def give_back(core: Preparing, *taken: Rows) -> list[Request]:
    for rows in taken:
        rows.work(MODEL, lambda: T)
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

    assert (first.start, first.stop) == (0, ROWS_AT_A_TIME)
    assert give_back(core, first) == []
    assert [take(core).request.ticket for _ in range(2)] == [1, 2]


def test_rows_of_one_request_are_spread_over_threads_and_come_back_in_their_places() -> None:
    large = request(1, 100, bounds=(50,))
    core = preparing(large)
    rows = [take(core) for _ in range(4)]
    for each in rows:
        each.work(Model(ModelSpec("m"), forward=list, preprocess=doubled, length=int), lambda: T)
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
    samples[5] = samples[40] = -1
    core = preparing(request(1, samples))
    early, late = take(core), take(core)

    assert give_back(core, late) == []  # an earlier row may still fail
    assert not core.waits(0)  # but no others are begun
    (failed,) = give_back(core, early)
    assert failed.failure is not None
    assert failed.failure.message == "sample 5: ValueError: -1 is negative"


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


def test_what_was_forgotten_is_dropped_when_it_comes_back() -> None:
    core = preparing(request(1, 100), request(2))
    rows = take(core)

    assert core.clear() == [1, 2]
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
    st.tuples(st.sampled_from(["collect", "collect", "clear"]), st.just(0), st.just(0), st.just(0)),
)


@given(st.lists(_DEED, max_size=60))
def test_every_request_comes_out_exactly_once_whatever_comes_together(deeds: list[tuple[str, int, int, int]]) -> None:
    core = Preparing()
    now, made, taken = T, 0, []
    deadlines: dict[int, float] = {}
    sizes: dict[int, int] = {}
    out: Counter[int] = Counter()

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
        elif what == "done" and taken:
            rows = taken.pop(a % len(taken))
            if b:
                rows.request.samples[rows.start] = -1
            rows.work(MODEL, lambda: T)
            core.done(rows)
        elif what == "cancel":
            core.cancel(a)
        elif what == "wait":
            now += a
        elif what == "clear":
            out.update(core.clear())
        elif what == "collect":
            collect()
        assert core.rows == sum(size for ticket, size in sizes.items() if not out[ticket])
        assert core.next_expiry <= min((r.deadline for r in core._requests.values() if r.failure is None), default=math.inf)

    while taken or core.waits(0) or core.waits(1):
        taken += [rows for model in (0, 1) if (rows := core.take(model, now)) is not None]
        if taken:
            rows = taken.pop()
            rows.work(MODEL, lambda: T)
            core.done(rows)
    collect()
    assert out == Counter(range(1, made + 1))
    assert core.rows == 0
