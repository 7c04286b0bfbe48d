"""The client's book of open calls: what is sent, tried again and given up, with time as a number."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.client import calls as module
from gpupool.client.calls import Call, Calls
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
    while (call := calls.next_unsent()) is not None:
        headers.append(msgpack.unpackb(calls.message(call, now)[0]))
        calls.mark_sent(call)
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
    frames = calls.message(call, 11.5)
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
        assert calls.next_unsent() is None
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
    assert calls.next_unsent() is unsent


def test_call_waiting_for_its_retry_is_not_sent_at_once_by_a_lost_connection(calls: Calls) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    calls.receive(answer(call, "overloaded", retry_after_ms=5000), 0.0)
    calls.disconnected()
    assert calls.next_unsent() is None


def test_reply_read_after_the_loss_still_counts(calls: Calls) -> None:
    call = calls.infer(1, 0.0)
    send_all(calls)
    calls.disconnected()
    assert calls.receive(answer(call), 0.0) is call
    assert calls.next_unsent() is None


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


def test_late_and_foreign_messages_are_counted_and_ignored(calls: Calls) -> None:
    call = calls.infer(1, 0.0, timeout=1.0)
    send_all(calls)
    calls.expire(1.0)
    for message in (answer(call), [], [b"\xc1"], [msgpack.packb({"v": 1, "code": "ok", "id": [1]})], [b""]):
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
    unsent = calls.infer(1, 0.0)
    assert calls.abandon(unsent) is None
    sent = calls.infer(1, 0.0)
    send_all(calls)
    message = calls.abandon(sent)
    assert message is not None
    header = parse_header(message)
    assert (header.type, header.id) == ("cancel", sent.id)
    assert calls.abandon(sent) is None
    assert not calls.open


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
    st.lists(st.tuples(st.sampled_from(["new", "send", "ok", "busy", "lost", "time", "drop"]), st.integers(0, 5)), max_size=60)
)
def test_every_call_ends_exactly_once_or_is_open_and_due(steps: list[tuple[str, int]]) -> None:
    calls, now, made, ended = Calls("tcp://here", rng=random.Random(0)), 0.0, [], []
    for step, n in steps:
        listed = list(calls.open.values())
        call = listed[n % len(listed)] if listed else None
        match step:
            case "new":
                made.append(calls.infer(n, now, timeout=n + 1.0, retry=n % 2 == 0))
            case "send":
                send_all(calls, now)
            case "ok" | "busy" if call is not None and call.sent:
                if (done := calls.receive(answer(call, "ok" if step == "ok" else "overloaded"), now)) is not None:
                    ended.append(done)
            case "lost":
                ended += calls.disconnected()
            case "time":
                now += n / 2
                ended += calls.expire(now)
            case "drop" if call is not None:
                calls.abandon(call)
                ended.append(call)
    assert len(set(map(id, ended))) == len(ended)
    assert {id(c) for c in made} == {id(c) for c in ended} | {id(c) for c in calls.open.values()}
    assert all((c.outcome is None) == (c.id in calls.open) for c in made)
    ended += calls.expire(now + 100)
    assert not calls.open
