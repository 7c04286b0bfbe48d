"""The client's book of open calls: what is sent, tried again and given up, with time as a number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.client import calls as module
from gpupool.client.budget import Budget, Budgets
from gpupool.client.call import Call
from gpupool.client.calls import Calls
from gpupool.client.reply import Reply
from gpupool.errors import (
    BadRequest,
    DeadlineExceeded,
    ErrorCode,
    GpuPoolError,
    Internal,
    InvalidInput,
    Overloaded,
    TooLarge,
    WorkerLost,
)
from gpupool.wire import parse_header


@pytest.fixture
def calls() -> Calls:
    return Calls("tcp://here", rng=random.Random(1))


def send_all(calls: Calls, now: float = 0.0) -> list[dict[str, Any]]:
    headers = []
    while (message := calls.next_message(now)) is not None:
        headers.append(msgpack.unpackb(message[0]))
        calls.mark_sent(now)
    return headers


def answer(call: Call, code: str = "ok", result: object = None, **fields: object) -> list[bytes]:
    retryable = code != "ok" and ErrorCode(code).retryable
    header = {"v": 1, "id": call.id, "code": code, "retryable": retryable, **fields}
    return [msgpack.packb(header), msgpack.packb(result) if code == "ok" else b""]


def error_of(call: Call) -> GpuPoolError:
    assert isinstance(call.outcome, GpuPoolError)
    return call.outcome


def test_message_has_a_valid_header_with_the_time_that_is_left(calls: Calls) -> None:
    call = calls.infer({"x": 1}, 10.0, timeout=2.0, model="m", priority=7, retry=False, key="k", trace="t", version="3")
    frames = calls.next_message(11.5)
    assert frames is not None
    header = parse_header(frames[0])
    assert (header.model, header.version, header.priority, header.retry, header.key, header.trace) == (
        "m",
        "3",
        7,
        False,
        "k",
        "t",
    )
    assert header.timeout_ms == 500
    assert header.id == call.id
    assert msgpack.unpackb(frames[1]) == {"x": 1}


def test_reply_ends_the_call_with_everything_it_says(calls: Calls) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    message = answer(call, result=[1], model="m", version="2", worker=3, attempts=2, fallback=True, timings_ms={"total": 1.5})
    assert calls.receive(message, 1.0) is call
    assert call.result() == Reply(call.id, [1], "m", "2", 3, 2, True, {"total": 1.5})
    assert not calls.open


def test_error_reply_raises_the_class_of_its_code_with_its_fields(calls: Calls) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    calls.receive(answer(call, "invalid_input", message="no text", field="text"), 1.0)
    with pytest.raises(InvalidInput, match="no text") as caught:
        call.result()
    assert caught.value.field == "text"


def test_retryable_answer_is_tried_again_after_a_wait_and_then_raised(calls: Calls) -> None:
    call = calls.infer(1, 0.0, retries=2, timeout=100.0)
    now = 0.0
    for _ in range(2):
        assert len(send_all(calls, now)) == 1
        assert calls.receive(answer(call, "no_workers"), now) is None
        assert calls.next_message(now) is None
        now = calls.due()
        assert calls.expire(now) == []
    assert len(send_all(calls, now)) == 1
    assert calls.receive(answer(call, "no_workers"), now) is call
    assert error_of(call).code is ErrorCode.NO_WORKERS


def test_wait_honours_what_the_pool_asks_for_and_adds_jitter(calls: Calls) -> None:
    waits = set()
    for _ in range(20):
        call = calls.infer(1, 0.0)
        send_all(calls)
        calls.receive(answer(call, "overloaded", retry_after_ms=1500), 0.0)
        assert call.not_before is not None
        waits.add(call.not_before)
    assert len(waits) == 20
    assert all(1.5 <= w <= 1.5 + module.FIRST_BACKOFF_S for w in waits)


@given(st.integers(0, 40), st.floats(0, 1e6))
def test_backoff_is_bounded(failures: int, now: float) -> None:
    calls = Calls("tcp://here", rng=random.Random(failures))
    call = calls.infer(1, now, retries=100, timeout=1000.0)
    send_all(calls)
    call.failures = failures
    calls.receive(answer(call, "internal"), now)
    assert call.not_before is not None
    assert now <= call.not_before <= now + module.MAX_BACKOFF_S


def test_retry_that_would_come_after_the_deadline_is_not_waited_for(calls: Calls) -> None:
    call = calls.infer(1, 0.0, timeout=1.0)
    send_all(calls)
    assert calls.receive(answer(call, "overloaded", retry_after_ms=2000), 0.5) is call
    assert error_of(call).retry_after_ms == 2000


@pytest.mark.parametrize(
    ("code", "again"),
    [("overloaded", True), ("no_workers", True), ("draining", True), ("worker_lost", False), ("internal", False)],
)
def test_request_that_must_not_run_twice_is_repeated_only_if_it_never_ran(calls: Calls, code: str, *, again: bool) -> None:
    call = calls.infer(1, 0.0, retry=False)
    send_all(calls)
    assert (calls.receive(answer(call, code), 0.0) is None) == again


@pytest.mark.parametrize("code", ["deadline_exceeded", "bad_request", "model_error", "poison", "cancelled"])
def test_answers_that_another_try_cannot_change_are_final(calls: Calls, code: str) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    assert calls.receive(answer(call, code), 0.0) is call


def test_no_retries_means_none(calls: Calls) -> None:
    call = calls.infer(1, 0.0, retries=0)
    send_all(calls)
    assert calls.receive(answer(call, "overloaded"), 0.0) is call


def test_answer_to_a_request_that_was_begun_is_final_where_it_must_not_run_twice(calls: Calls) -> None:
    """A pool that stops answers `draining` to what its workers have in hand, too."""
    call = calls.infer(1, 0.0, retry=False)
    send_all(calls)
    assert calls.receive(answer(call, "draining", attempts=1), 0.0) is call


@pytest.mark.parametrize(("wait", "again"), [(float("nan"), True), (float("inf"), False), (1e300, False), (-5, True)])
def test_wait_that_makes_no_sense_does_no_harm(calls: Calls, wait: float, *, again: bool) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    assert (calls.receive(answer(call, "overloaded", retry_after_ms=wait), 0.0) is None) == again
    assert call.not_before is None or 0 <= call.not_before <= module.FIRST_BACKOFF_S


def test_retries_never_make_an_overload_much_worse(calls: Calls) -> None:
    """100 requests a second for a minute, all refused: without a budget they would be sent four times each."""
    sent, now = 0, 0.0
    for _ in range(6000):
        now += 0.01
        calls.infer(1, now)
        calls.expire(now)
        for header in send_all(calls, now):
            sent += 1
            calls.receive(answer(calls.open[header["id"]], "overloaded", retry_after_ms=100), now)
    assert 6000 * 1.15 < sent <= 6000 * 1.2 + 100 + 60


def test_error_says_when_it_was_the_budget_that_ended_it(calls: Calls) -> None:
    poor = Calls("tcp://here", budgets=Budgets(retries=Budget(share=0.0, burst=0.0)))
    call = poor.infer(1, 0.0)
    send_all(poor)
    assert poor.receive(answer(call, "no_workers"), 0.0) is call
    assert "not tried again" in error_of(call).__notes__[0]
    assert error_of(call).retryable


def hedged(calls: Calls, **options: Any) -> Call:
    """A call that was sent at 0.0 and again at 1.0."""
    call = calls.infer({"x": 1}, 0.0, hedge_after=1.0, **options)
    assert [h["id"] for h in send_all(calls, 0.0)] == [call.id]
    calls.expire(1.0)
    (header,) = send_all(calls, 1.0)
    assert header["id"] == f"{call.id}h"
    assert header["timeout_ms"] == 29000
    return call


def hedge_answer(call: Call, code: str = "ok", result: object = None, **fields: object) -> list[bytes]:
    header, *body = answer(call, code, result, **fields)
    return [msgpack.packb({**msgpack.unpackb(header), "id": f"{call.id}h"}), *body]


def cancels(calls: Calls) -> list[str]:
    headers = send_all(calls)
    assert {h["type"] for h in headers} <= {"cancel"}
    return [h["id"] for h in headers]


def test_hedge_goes_out_once_when_its_time_has_come_and_not_before(calls: Calls) -> None:
    call = calls.infer(1, 0.0, hedge_after=1.0, timeout=30.0)
    assert calls.due() == 30.0  # counted from sending, so nothing is due before that
    send_all(calls, 0.5)
    assert calls.due() == 1.5
    calls.expire(1.499)
    assert send_all(calls) == []
    calls.expire(1.5)
    assert [h["id"] for h in send_all(calls, 1.5)] == [f"{call.id}h"]
    assert calls.due() == 30.0
    calls.expire(10.0)
    assert send_all(calls) == []


def test_first_good_answer_wins_and_the_other_request_is_cancelled(calls: Calls) -> None:
    call = hedged(calls)
    assert calls.receive(hedge_answer(call, result=2), 1.5) is call
    assert (call.result().result, call.result().id) == (2, call.id)
    assert cancels(calls) == [call.id]
    assert calls.receive(answer(call, "cancelled"), 1.6) is None
    other = hedged(calls)
    assert calls.receive(answer(other, result=1), 1.5) is other
    assert cancels(calls) == [f"{other.id}h"]
    assert calls.receive(hedge_answer(other, result=2), 1.6) is None  # the result was on its way already
    assert calls.strays == 0
    assert not calls.open


def test_refused_hedge_leaves_the_first_request_open(calls: Calls) -> None:
    call = hedged(calls)
    assert calls.receive(hedge_answer(call, "overloaded", retry_after_ms=10), 1.1) is None
    assert send_all(calls, 9.0) == []
    assert calls.receive(answer(call, result=1), 9.0) is call
    assert call.result().result == 1
    assert cancels(calls) == []


def test_first_request_lost_leaves_the_hedge_open_and_both_lost_are_tried_again(calls: Calls) -> None:
    call = hedged(calls)
    assert calls.receive(answer(call, "worker_lost"), 1.1) is None
    assert calls.receive(hedge_answer(call, "overloaded"), 1.2) is None
    calls.expire(calls.due())
    assert [h["id"] for h in send_all(calls, 3.0)] == [call.id]  # its old self was answered, so its id is free
    calls.expire(9.0)
    assert send_all(calls) == []  # hedged once
    assert calls.receive(answer(call, result=5), 9.0) is call


def test_error_that_nothing_can_change_ends_a_hedged_call(calls: Calls) -> None:
    call = hedged(calls)
    assert calls.receive(hedge_answer(call, "model_error"), 1.1) is call
    assert cancels(calls) == [call.id]


def test_hedged_call_that_is_given_up_or_late_is_cancelled_twice(calls: Calls) -> None:
    given_up = hedged(calls)
    calls.abandon(given_up)
    assert sorted(cancels(calls)) == [given_up.id, f"{given_up.id}h"]
    late = hedged(calls)
    assert calls.expire(30.0) == [late]
    assert sorted(cancels(calls)) == [late.id, f"{late.id}h"]


def test_lost_connection_sends_a_hedged_call_again_once(calls: Calls) -> None:
    call = hedged(calls)
    assert calls.disconnected() == []
    assert [h["id"] for h in send_all(calls, 2.0)] == [call.id]
    alone = hedged(calls)
    calls.receive(answer(alone, "worker_lost"), 1.1)
    calls.disconnected()
    assert [h["id"] for h in send_all(calls, 2.0)] == [call.id, f"{alone.id}h"]
    calls.receive(hedge_answer(alone, result=1), 2.0)
    assert alone.result().result == 1


def test_what_must_not_run_twice_is_never_hedged(calls: Calls) -> None:
    calls.infer(1, 0.0, hedge_after=1.0, retry=False)
    send_all(calls)
    calls.expire(20.0)
    assert send_all(calls) == []


def test_request_that_waits_for_its_connection_or_its_retry_is_not_hedged(calls: Calls) -> None:
    calls.infer(1, 0.0, hedge_after=1.0)
    calls.expire(5.0)
    assert len(send_all(calls, 5.0)) == 1
    (call,) = calls.open.values()
    calls.receive(answer(call, "overloaded", retry_after_ms=10_000), 5.5)
    calls.expire(7.0)
    assert send_all(calls) == []


def test_hedges_are_a_small_share_of_the_requests(calls: Calls) -> None:
    """However slow the pool is: 1000 requests, none of them answered in time."""
    made = 0
    for n in range(1000):
        call = calls.infer(1, float(n), hedge_after=0.5)
        send_all(calls, n)
        calls.expire(n + 0.5)
        made += len(send_all(calls, n + 0.5))
        calls.receive(answer(call), n + 0.6)
        send_all(calls, n + 0.6)
    assert 45 <= made <= 55


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_time_to_hedge_after_is_checked(calls: Calls, seconds: float) -> None:
    with pytest.raises(ValueError, match="hedge_after"):
        calls.infer(1, 0.0, hedge_after=seconds)


def test_ids_given_up_are_remembered_up_to_a_bound(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GIVEN_UP", 2)
    made = [calls.infer(1, 0.0) for _ in range(3)]
    send_all(calls)
    for call in made:
        calls.abandon(call)
    for call in made:
        calls.receive(answer(call, "cancelled"), 0.0)
    assert calls.strays == 1
    assert not calls._given_up


def test_lost_connection_sends_open_calls_again_under_their_ids(calls: Calls) -> None:
    made = [calls.infer(n, 0.0, timeout=10.0) for n in range(3)]
    first = send_all(calls)
    calls.receive(answer(made[0]), 1.0)
    assert calls.disconnected() == []
    again = send_all(calls, 4.0)
    assert [h["id"] for h in again] == [h["id"] for h in first[1:]]
    assert [h["timeout_ms"] for h in again] == [6000, 6000]
    assert [c.failures for c in made] == [0, 0, 0]


def test_lost_connection_ends_what_must_not_run_twice(calls: Calls) -> None:
    call, unsent = calls.infer(1, 0.0, retry=False), None
    send_all(calls)
    unsent = calls.infer(2, 0.0, retry=False)
    assert calls.disconnected() == [call]
    assert isinstance(call.outcome, WorkerLost)
    assert not call.outcome.retryable
    assert [h["id"] for h in send_all(calls)] == [unsent.id]


def test_call_waiting_for_its_retry_is_not_sent_at_once_by_a_lost_connection(calls: Calls) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    calls.receive(answer(call, "overloaded", retry_after_ms=5000), 0.0)
    calls.disconnected()
    assert send_all(calls) == []


def test_reply_read_after_the_loss_still_counts(calls: Calls) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    calls.disconnected()
    assert calls.receive(answer(call), 0.0) is call
    assert send_all(calls) == []


def test_silence_ends_at_the_deadline_and_says_what_was_missing(calls: Calls) -> None:
    sent = calls.infer(1, 0.0, timeout=2.0)
    send_all(calls)
    unsent = calls.infer(2, 0.0, timeout=3.0)
    assert calls.due() == 2.0
    assert calls.expire(1.999) == []
    assert calls.expire(2.0) == [sent]
    assert isinstance(sent.outcome, DeadlineExceeded)
    assert "no reply within 2 s" in str(sent.outcome)
    assert calls.due() == 3.0
    assert calls.expire(3.0) == [unsent]
    assert "no connection to tcp://here" in str(error_of(unsent))
    assert calls.due() == float("inf")


def test_foreign_messages_are_counted_and_a_late_answer_is_not(calls: Calls) -> None:
    call = calls.infer(1, 0.0, timeout=1.0)
    send_all(calls)
    calls.expire(1.0)
    for message in (answer(call), answer(call), [], [b"\xc1"], [msgpack.packb({"v": 1, "code": "ok", "id": [1]})], [b""]):
        assert calls.receive(message, 1.0) is None
    assert calls.strays == 5


def test_second_reply_to_a_call_is_ignored(calls: Calls) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    calls.receive(answer(call, result=1), 0.0)
    assert calls.receive(answer(call, result=2), 0.0) is None
    assert call.result().result == 1


def test_unreadable_result_is_an_internal_error(calls: Calls) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    calls.receive([answer(call)[0], b"\xc1"], 0.0)
    assert isinstance(call.outcome, Internal)


def test_abandoned_call_is_cancelled_in_the_pool_once_it_was_sent(calls: Calls) -> None:
    calls.abandon(calls.infer(1, 0.0))
    assert send_all(calls) == []
    sent = calls.infer(1, 0.0)
    send_all(calls)
    calls.infer(2, 0.0)
    calls.abandon(sent)
    calls.abandon(sent)
    message = calls.next_message(0.0)
    assert message is not None
    header = parse_header(message[0])
    assert (header.type, header.id) == ("cancel", sent.id)  # before what else waits: it makes room
    assert [h.get("type") for h in send_all(calls)] == ["cancel", None]
    assert calls.receive(answer(sent, "cancelled"), 0.0) is None
    assert calls.strays == 0


def test_what_cannot_be_sent_is_refused_here(calls: Calls) -> None:
    with pytest.raises(InvalidInput, match=r"images\[1\]") as caught:
        calls.infer({"images": [1, {2}]}, 0.0)
    assert caught.value.field == "images[1]"
    with pytest.raises(BadRequest, match="nested deeper"):
        calls.infer(eval("[" * 40 + "]" * 40), 0.0)
    with pytest.raises(TooLarge, match="the limit is 67108864"):
        calls.infer(bytes(module.MAX_MESSAGE_BYTES + 1), 0.0)
    with pytest.raises(TooLarge, match="the limit is 65536"):
        calls.infer([0] * 65537, 0.0, many=True)
    with pytest.raises(TypeError, match="a list of samples"):
        calls.infer({"a": 1}, 0.0, many=True)
    for timeout in (0, -1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="timeout"):
            calls.infer(1, 0.0, timeout=timeout)
    assert not calls.open


def test_open_calls_are_bounded(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    calls.infer(1, 0.0)
    calls.infer(1, 0.0)
    with pytest.raises(Overloaded):
        calls.infer(1, 0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["new", "send", "ok", "busy", "hedge ok", "hedge busy", "lost", "time", "drop"]), st.integers(0, 5)
        ),
        max_size=60,
    )
)
def test_every_call_ends_exactly_once_or_is_open_and_due(steps: list[tuple[str, int]]) -> None:
    calls, now, made, ended = Calls("tcp://here", rng=random.Random(0)), 0.0, [], []
    for step, n in steps:
        listed = list(calls.open.values())
        call = listed[n % len(listed)] if listed else None
        match step:
            case "new":
                made.append(calls.infer(n, now, timeout=n + 1.0, retry=n % 2 == 0, hedge_after=0.5 if n > 2 else None))
            case "send":
                send_all(calls, now)
            case "ok" | "busy" if call is not None and any(a.sent and a.id == call.id for a in call.attempts):
                if (done := calls.receive(answer(call, "ok" if step == "ok" else "overloaded"), now)) is not None:
                    ended.append(done)
            case "hedge ok" | "hedge busy" if call is not None and any(a.sent and a.id.endswith("h") for a in call.attempts):
                code = "ok" if step == "hedge ok" else "overloaded"
                if (done := calls.receive(hedge_answer(call, code), now)) is not None:
                    ended.append(done)
            case "lost":
                ended += calls.disconnected()
            case "time":
                now += n / 2
                ended += calls.expire(now)
            case "drop" if call is not None:
                calls.abandon(call)
                ended.append(call)
        assert sorted(calls._attempts) == sorted(a.id for c in calls.open.values() for a in c.attempts)
        assert all(len(c.attempts) + (c.not_before is not None) in (1, 2) for c in calls.open.values())
    assert len(set(map(id, ended))) == len(ended)
    assert {id(c) for c in made} == {id(c) for c in ended} | {id(c) for c in calls.open.values()}
    assert all((c.outcome is None) == (c.id in calls.open) for c in made)
    assert calls.strays == 0
    ended += calls.expire(now + 100)
    assert not calls.open


class Watched(dict[str, Call]):
    """Open calls that may not be gone through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all open calls were looked at")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_only_those_whose_time_has_come_are_looked_at(calls: Calls) -> None:
    late = calls.infer(1, 0.0, timeout=1.0)
    hedged = calls.infer(1, 0.0, timeout=9.0, hedge_after=2.0)
    again = calls.infer(1, 0.0, timeout=9.0)
    for _ in range(100):
        calls.infer(1, 0.0, timeout=10.0)
    send_all(calls)
    calls.receive(answer(again, "overloaded", retry_after_ms=3000), 0.0)
    calls.open = Watched(calls.open)

    assert calls.expire(1.0) == [late]
    assert calls.expire(2.0) == []
    assert [h["id"] for h in send_all(calls, 2.0)] == [late.id, f"{hedged.id}h"]
    assert calls.expire(4.0) == []
    assert [h["id"] for h in send_all(calls, 4.0)] == [again.id]
    assert calls.expire(9.0) == [hedged, again]
    assert calls.due() == 10.0
