"""Reply headers and log records."""

from __future__ import annotations

import json

import pytest

from gpupool import wire
from gpupool.errors import ErrorCode
from gpupool.link import Result
from gpupool.log_sink import iso
from gpupool.router.accounts import Accounts
from gpupool.router.replies import RETRYABLE, Replies, client_name
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant
from gpupool.spec import ModelSpec
from support.log_lines import check

TENANT = Tenant()


def request(**options: bool) -> Request:
    return Request(b"client", TENANT, "id", 1, 10.0, 40.0, (b"body",), 4, **options)


def test_every_code_says_whether_to_retry() -> None:
    assert set(RETRYABLE) == {"ok", *ErrorCode}
    assert RETRYABLE["overloaded"]
    assert not RETRYABLE["poison"]
    assert not RETRYABLE["ok"]


def test_never_sent_request_names_no_worker_and_waited_all_the_time() -> None:
    reply = Replies([ModelSpec("m")], 8).finished(request(), "deadline_exceeded", 12.5, message="late")

    header = wire.parse_reply(reply.frames[1])
    assert "worker" not in header
    assert header["attempts"] == 0
    assert header["timings_ms"]["pending"] == header["timings_ms"]["total"] == 2500.0
    assert reply.frames[2:] == [b""]
    assert reply.record["message"] == "late"


@pytest.mark.parametrize("code", ErrorCode)
def test_what_a_worker_says_of_a_request_is_for_its_client_alone(code: ErrorCode) -> None:
    made = request()
    made.slot, made.sent = 0, 10.5
    reply = Replies([ModelSpec("m")], 8).finished(made, code, 11.0, message="s3cret", result=Result(7, code))
    assert wire.parse_reply(reply.frames[1])["message"] == "s3cret"
    assert "s3cret" not in str(reply.record)


def test_buffers_of_a_result_follow_the_body() -> None:
    made = request(delimiter=True)
    made.slot, made.sent, made.attempts = 2, 10.5, 1

    reply = Replies([ModelSpec("m")], 8).finished(made, "ok", 11.0, result=Result(7, "ok", frames=(b"b", b"1", b"22")))

    assert reply.frames[:2] == [b"client", b""]
    assert reply.frames[3:] == [b"b", b"1", b"22"]
    assert wire.parse_reply(reply.frames[2])["worker"] == 2
    assert reply.record["output_bytes"] == 4


def test_times_are_rounded_to_microseconds() -> None:
    made = request()
    made.slot, made.sent = 0, 10.0

    reply = Replies([ModelSpec("m")], 8).finished(
        made, "ok", 10.0001239, result=Result(1, "ok", forward_s=0.0123456, frames=(b"",))
    )

    assert reply.record["total_ms"] == 0.124
    assert reply.record["forward_ms"] == 12.346


def test_refusal_without_an_id_has_none() -> None:
    reply = Replies([ModelSpec("m")], 8).refused(b"c", "bad_request", "no", delimiter=False, request_id=None)

    assert wire.parse_reply(reply.frames[1]) == {"v": 1, "code": "bad_request", "retryable": False, "message": "no"}


def test_connections_are_named_shortly() -> None:
    assert client_name(b"\x00\x01\x02\x03\x04") == "0001020304"
    assert len(client_name(b"x" * 255)) == 16


def test_reasons_of_redispatch_are_bounded() -> None:
    accounts = Accounts()

    for i in range(1000):
        accounts.redispatch(f"reason {i}")

    assert accounts.redispatched.total() == 1000
    assert len(accounts.redispatched) <= 65
    assert accounts.redispatched["other"] == 936


@pytest.mark.parametrize(("share", "step"), [(0.1, 1), (0.1, 10), (0.5, 2), (0.01, 7)])
def test_the_sample_holds_its_share_whatever_steps_tickets_come_in(share: float, step: int) -> None:
    replies = Replies([ModelSpec("m")], 8)
    replies.sample(share)

    records = 0
    for n in range(10_000):
        made = Request(b"client", TENANT, "id", 1, 10.0, 40.0, (b"body",), 4)
        made.ticket = n * step
        records += bool(replies.finished(made, "ok", 11.0, result=Result(n, "ok", frames=(b"b",))).record)

    assert abs(records - share * 10_000) <= 10


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_only_records_of_ok_requests_are_sampled(share: float) -> None:
    replies = Replies([ModelSpec("m")], 8)
    replies.sample(share)

    good = replies.finished(request(), "ok", 11.0, result=Result(7, "ok", frames=(b"b",)))
    bad = replies.finished(request(), "worker_lost", 11.0, message="lost")

    assert bool(good.record) is (share == 1.0)
    assert good.frames[2] == b"b"
    assert bad.record["code"] == "worker_lost"


@pytest.mark.parametrize(("code", "accepted"), [("ok", True), ("worker_lost", True), ("overloaded", False)])
def test_a_record_with_all_it_can_have_is_as_published(code: str, accepted: bool) -> None:
    replies = Replies([ModelSpec("m")], 2)
    if accepted:
        made = request()
        made.tenant, made.slot, made.sent, made.sends, made.incarnation = Tenant("alice"), 2, 10.5, 1, 3
        reply = replies.finished(made, code, 11.0, message="why", result=Result(7, "ok", frames=(b"b",)), retry_after_ms=5)
        assert reply.record["overflow"]
        assert reply.record["sends"] == 1
    else:
        reply = replies.refused(b"client", code, "why", delimiter=False, request_id=b"id", field="f", user="alice")
    about = {"time": 1.5, "timestamp": iso(1.5), "level": "info", "event": "request", "component": "router", "pid": 1}

    assert reply.record["user"] == "alice"
    check(json.dumps({**about, **reply.record, "trace_id": "0af7651916cd43dd8448eb211c80319c"}))
