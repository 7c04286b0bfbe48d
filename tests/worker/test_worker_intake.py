"""From work to items and from batches to answers, without sockets."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest

from gpupool.errors import ErrorCode, InvalidInput
from gpupool.link import Marks, Result, Work, WorkFlag
from gpupool.samples import unpack_body
from gpupool.spec import BatchingSpec, ModelSpec
from gpupool.worker.batch import Batch, CloseReason, Item, Share
from gpupool.worker.faults import Failure
from gpupool.worker.intake import MAX_WAITING, Intake
from gpupool.worker.models import Model
from gpupool.worker.preparers import Preparers
from gpupool.worker.replies import Done, Replies
from gpupool.worker.rows import SLICE_S

T = 50.0


class Clock:
    def __init__(self) -> None:
        self.now = T

    def __call__(self) -> float:
        return self.now


def model(buckets: tuple[int, ...] = (), **methods: Any) -> Model:
    return Model(ModelSpec("m", batching=BatchingSpec(length_buckets=buckets)), forward=list, **methods)


def intake_of(models: list[Model], clock: Clock, preparers: Preparers | None = None) -> Intake:
    return Intake(models, [m.spec.batching for m in models], preparers or Preparers(models, clock=clock), clock)


def work(ticket: int, value: Any, *, many: bool = False, timeout_s: float = 10.0, number: int = 0) -> Work:
    rows = len(value) if many else 1
    return Work(ticket, number, WorkFlag.MANY if many else 0, rows, timeout_s, 5, [msgpack.packb(value)])


def admit(intake: Intake, *works: Work) -> tuple[list[Item], list[Result]]:
    assert intake.put(works, 1, T, queued=0) == []
    return intake.advance()


def admit_through(models: list[Model], *works: Work) -> tuple[list[Item], list[Result]]:
    """What comes of them when preprocessing is done too, here and now."""
    preparers = Preparers(models, clock=Clock())
    intake = intake_of(models, Clock(), preparers)
    items, results = admit(intake, *works)
    while preparers.step(0, 1):
        pass
    more, others = intake.advance()
    return items + more, results + others


def answer(replies: Replies, items: list[Item], outputs: list[Any]) -> list[Result]:
    shares = [Share(i, 0, i.rows) for i in items]
    return replies.of(Done(Batch(items[0].key, shares, len(outputs), CloseReason.FULL), outputs, T + 1.0, 0.25))


def samples(item: Item) -> list[Any]:
    found: list[Any] = item.owner.samples(0, item.rows)
    return found


def test_a_sample_becomes_an_item_with_its_deadline() -> None:
    items, results = admit(intake_of([model()], Clock()), work(7, {"x": 1}, timeout_s=3.0))

    assert not results
    assert (items[0].ticket, items[0].key, items[0].deadline, items[0].rows) == (7, (0, 0), T + 3.0, 1)
    assert samples(items[0]) == [{"x": 1}]


def test_rows_of_many_fall_into_their_buckets() -> None:
    items, _ = admit(intake_of([model((2, 4), length=len)], Clock()), work(1, ["a", "abc", "bb", "toolong", "dddd"], many=True))

    assert [(i.key[1], samples(i)) for i in items] == [(0, ["toolong"]), (2, ["a", "bb"]), (4, ["abc", "dddd"])]


def test_what_is_urgent_goes_before_every_priority() -> None:
    urgent = work(1, "x")
    urgent.flags, urgent.priority = WorkFlag.URGENT, 0
    highest = work(2, "x")
    highest.priority = 9

    items, _ = admit(intake_of([model()], Clock()), highest, urgent)

    assert items[1].priority > items[0].priority


def test_one_bad_body_is_answered_and_hurts_nobody() -> None:
    broken = Work(1, 0, 0, 1, 10.0, 5, [b"\xc1"])
    items, results = admit(intake_of([model()], Clock()), broken, work(2, 5))

    assert [i.ticket for i in items] == [2]
    assert [(r.ticket, r.code, r.started) for r in results] == [(1, "bad_request", False)]


@pytest.mark.parametrize("method", ["length", "preprocess"])
def test_a_handler_that_refuses_a_sample_names_the_field(method: str) -> None:
    def refuse(sample: Any) -> Any:
        if sample == 2:
            raise InvalidInput("not a picture", field="image")
        return 1

    items, results = admit_through([model((), **{method: refuse})], work(1, 2), work(2, 3), work(3, [1, 2], many=True))

    assert [i.ticket for i in items] == [2]
    assert [(r.code, r.field, r.message) for r in results] == [
        ("invalid_input", "image", "not a picture"),
        ("invalid_input", "image", "sample 1: not a picture"),
    ]


def test_any_other_error_in_preprocess_is_the_models() -> None:
    _, results = admit_through([model(preprocess=lambda s: s["x"])], work(1, {}))

    assert (results[0].code, results[0].message) == ("model_error", "KeyError: 'x'")


def test_work_past_its_deadline_is_not_even_decoded() -> None:
    clock = Clock()
    clock.now = T + 5
    _, results = admit(intake_of([model()], clock), work(1, {}, timeout_s=4.0))

    assert results[0].code == "deadline_exceeded"
    assert not results[0].started


def test_a_body_that_is_no_list_is_no_many() -> None:
    _, results = admit(intake_of([model()], Clock()), Work(1, 0, WorkFlag.MANY, 1, 10.0, 5, [msgpack.packb({"a": 1})]))

    assert (results[0].code, results[0].field) == ("bad_request", "many")


def test_no_samples_are_answered_with_no_results() -> None:
    _, results = admit(intake_of([model()], Clock()), work(1, [], many=True))

    assert results[0].code == "ok"
    assert unpack_body(results[0].frames[0], results[0].frames[1:]) == []


def test_an_unknown_model_number_is_our_fault() -> None:
    _, results = admit(intake_of([model()], Clock()), work(1, 1, number=3))

    assert results[0].code == "internal"


def test_more_than_a_worker_may_hold_is_refused() -> None:
    intake = intake_of([model()], Clock())

    refused = intake.put([work(1, 1), work(2, 2)], 1, T, queued=MAX_WAITING - 1)

    assert [(r.ticket, r.code, r.started) for r in refused] == [(2, "overloaded", False)]
    assert [i.ticket for i in intake.advance()[0]] == [1]


def test_a_large_request_is_measured_in_slices() -> None:
    clock = Clock()

    def slow(sample: int) -> int:
        clock.now += SLICE_S / 10
        return sample

    intake = intake_of([model((500,), length=slow)], clock)
    items, _ = admit(intake, work(1, list(range(1000)), many=True))
    turns = 1
    while not items:
        assert intake.look_at() == 0.0
        assert intake.rows == 1000
        items, _ = intake.advance()
        turns += 1

    assert turns > 10
    assert intake.look_at() == math.inf
    assert [(i.key[1], samples(i)) for i in items] == [(0, list(range(501, 1000))), (500, list(range(501)))]


def test_a_cancelled_request_is_dropped_and_answered_wherever_it_stands() -> None:
    clock = Clock()

    def slow(sample: int) -> int:
        clock.now += SLICE_S
        return sample

    intake = intake_of([model(length=slow), model(preprocess=slow)], clock)
    admit(intake, work(4, 5, number=1), work(1, list(range(100)), many=True), work(2, 1), work(3, 2))

    assert all(intake.cancel(ticket) for ticket in (1, 2, 4))
    assert not intake.cancel(9)
    items, results = intake.advance()
    assert [i.ticket for i in items] == [3]
    assert sorted((r.ticket, r.code, r.started) for r in results) == [(n, "cancelled", False) for n in (1, 2, 4)]
    assert (intake.rows, intake.look_at()) == (0, math.inf)


def test_what_is_preprocessed_counts_as_waiting_and_is_given_back() -> None:
    models = [model(preprocess=lambda s: s), model()]
    preparers = Preparers(models, clock=Clock())
    intake = intake_of(models, Clock(), preparers)
    admit(intake, work(1, [1] * MAX_WAITING, many=True))

    assert intake.rows == MAX_WAITING
    assert [r.code for r in intake.put([work(2, 1)], 1, T, queued=0)] == ["overloaded"]
    assert intake.untouched() == [1]
    assert intake.rows == 0
    assert not preparers.step(0, 1)


def test_a_stop_gives_back_what_was_measured_and_keeps_what_was_preprocessed() -> None:
    clock = Clock()

    def slow(sample: int) -> int:
        clock.now += SLICE_S
        return sample

    models = [model(length=slow), model(preprocess=slow), model()]
    preparers = Preparers(models, clock=clock)
    intake = intake_of(models, clock, preparers)
    works = [work(1, 1, number=1), work(2, [1] * 9, many=True, number=1), work(3, 3, number=1), work(4, [1] * 9, many=True)]
    items, _ = admit(intake, *works, work(5, 5, number=2))
    assert preparers.step(1, 1)
    assert preparers.step(1, 1)

    assert sorted(intake.untouched()) == [3, 4, 5]
    while preparers.step(1, 1):
        pass
    items, results = intake.advance()
    assert sorted((i.ticket, i.begun) for i in items) == [(1, True), (2, True)]
    assert (results, intake.rows) == ([], 0)


def test_what_a_preprocess_has_had_counts_as_started_and_what_was_only_measured_does_not() -> None:
    def refuse(sample: int) -> int:
        raise ValueError(sample)

    failed = [admit_through([m], work(1, 1))[1][0] for m in (model(preprocess=refuse), model(length=refuse))]

    assert [(r.code, r.started) for r in failed] == [("model_error", True), ("model_error", False)]


def test_a_length_that_runs_out_of_memory_makes_room_at_once_and_one_past_its_deadline_measures_no_more() -> None:
    clock, relieved, measured = Clock(), [], []

    def hungry(sample: int) -> int:
        measured.append(sample)
        clock.now += 1.0
        if sample == 7:
            raise MemoryError
        return sample

    target = model(length=hungry)
    intake = Intake(
        [target], [target.spec.batching], Preparers([target], clock=clock), clock, relieve=lambda: relieved.append(1)
    )
    _, results = admit(intake, work(1, 7), work(2, [1] * 9, many=True, timeout_s=3.5))
    while not len(results) == 2:
        results += intake.advance()[1]

    assert [(r.code, r.started) for r in results] == [("out_of_memory", False), ("deadline_exceeded", False)]
    assert relieved == [1]
    assert measured == [7, 1, 1, 1]


def test_a_model_without_preprocess_pays_no_way_through_threads() -> None:
    preparers = Preparers([model(length=lambda s: s)], clock=Clock())
    items, _ = admit(intake_of([model(length=lambda s: s)], Clock(), preparers), work(1, 4))

    assert samples(items[0]) == [4]


def test_a_request_of_no_samples_needs_no_preprocessing() -> None:
    _, results = admit(intake_of([model(preprocess=lambda s: s)], Clock()), work(1, [], many=True))

    assert results[0].code == "ok"


def test_an_answer_bears_result_and_times() -> None:
    models = [model(postprocess=lambda v: {"y": v})]
    items, _ = admit(intake_of(models, Clock()), work(1, 5))

    result = answer(Replies(models, Clock()), items, [25])[0]

    assert result.code == "ok"
    assert unpack_body(result.frames[0], ()) == {"y": 25}
    assert (result.queue_s, result.forward_s, result.batch_size, result.started) == (1.0, 0.25, 1, True)


def test_rows_come_back_in_order_from_buckets_and_batches() -> None:
    models = [model((1,), length=len)]
    items, _ = admit(intake_of(models, Clock()), work(1, ["a", "bb", "c", "dd"], many=True))
    replies = Replies(models, Clock())

    assert answer(replies, items[:1], ["BB", "DD"]) == []
    results = answer(replies, items[1:], ["A", "C"])

    assert unpack_body(results[0].frames[0], ()) == ["A", "BB", "C", "DD"]


def test_the_first_row_that_fails_ends_a_request_once() -> None:
    models = [model((1,), length=len)]
    items, _ = admit(intake_of(models, Clock()), work(1, ["a", "bb", "c"], many=True))
    replies = Replies(models, Clock())

    results = answer(replies, items[1:], ["A", Failure(ErrorCode.MODEL_ERROR, "bad")])

    assert [(r.code, r.message) for r in results] == [("model_error", "sample 2: bad")]
    assert answer(replies, items[:1], ["BB"]) == []


def test_a_postprocess_that_raises_fails_its_own_request() -> None:
    models = [model(postprocess=lambda v: 1 / v)]
    items, _ = admit(intake_of(models, Clock()), work(1, 1), work(2, 1))

    assert [r.code for r in answer(Replies(models, Clock()), items, [0, 2])] == ["model_error", "ok"]


class Odd:
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [{1, 2}, 2**70, object(), Odd(), {"a": [{3}]}], ids=["set", "big", "object", "odd", "deep"])
def test_what_cannot_be_sent_fails_its_caller_only(value: Any) -> None:
    models = [model()]
    items, _ = admit(intake_of(models, Clock()), work(1, 1), work(2, 1))

    results = answer(Replies(models, Clock()), items, [value, "fine"])

    assert [r.code for r in results] == ["model_error", "ok"]
    assert "cannot be sent" in results[0].message


def test_nan_and_infinity_pass_unchanged() -> None:
    models = [model()]
    items, _ = admit(intake_of(models, Clock()), work(1, 1))

    body = unpack_body(answer(Replies(models, Clock()), items, [[math.nan, math.inf, -math.inf]])[0].frames[0], ())

    assert isinstance(body, list)
    assert math.isnan(body[0])
    assert body[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize("stage", ["length", "preprocess"])
def test_buckets_that_change_while_a_large_request_is_prepared_lose_none_of_its_rows(stage: str) -> None:
    clock = Clock()

    def slow(sample: Any) -> Any:
        clock.now += SLICE_S / 10
        return len(sample)

    target = model((16, 128), length=slow, **({"preprocess": str.upper} if stage == "preprocess" else {}))
    policies = [target.spec.batching]
    preparers = Preparers([target], clock=clock)
    intake = Intake([target], policies, preparers, clock)
    assert intake.put([work(1, ["x" * (n % 40) for n in range(100)], many=True)], 1, T, queued=0) == []
    items, _ = intake.advance()
    assert not items
    policies[0] = BatchingSpec(length_buckets=())
    while not items:
        preparers.step(0, 1)
        items += intake.advance()[0]

    assert sum(item.rows for item in items) == 100


def test_a_traced_request_is_answered_with_the_instants_of_its_way() -> None:
    clock = Clock()
    replies = Replies([model()], clock)
    traced, plain = work(7, 1), work(8, 2)
    traced.flags |= WorkFlag.TRACED
    items, _ = admit(intake_of([model()], clock), traced, plain)
    clock.now = T + 1.5

    first, second = replies.of(
        Done(Batch((0, 0), [Share(i, 0, 1) for i in items], 2, CloseReason.MIN), [1, 2], T + 1.0, 0.25, number=9)
    )

    assert first.marks == Marks(T, 0.0, T + 1.0, T + 1.25, T + 1.5, T + 1.5, 9, T + 1.0, 2, 0, "min")
    assert second.marks is None


def test_a_traced_request_of_two_batches_tells_when_the_first_began_and_which_was_the_last() -> None:
    clock = Clock()
    replies = Replies([model()], clock)
    traced = work(7, [1, 2], many=True)
    traced.flags |= WorkFlag.TRACED
    (item,), _ = admit(intake_of([model()], clock), traced)

    results = []
    for n in range(2):
        clock.now = T + n + 2.0
        batch = Batch((0, 0), [Share(item, n, n + 1)], 1, CloseReason.FULL)
        results += replies.of(Done(batch, [n], T + n + 1.0, 0.25, number=n + 3))

    (result,) = results
    assert result.marks is not None
    assert (result.marks.forward_at, result.marks.forward_end) == (T + 1.0, T + 2.25)
    assert (result.marks.batch, result.marks.batch_at, result.forward_s) == (4, T + 2.0, 0.5)
