"""Histograms of latency, by model and stage."""

from __future__ import annotations

import msgpack

from gpupool.channel import MAX_MESSAGE_BYTES
from gpupool.errors import ErrorCode
from gpupool.link import Result
from gpupool.router.latencies import Latencies
from gpupool.router.replies import Replies
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant
from gpupool.spec import ModelSpec
from gpupool.stages import BOUNDS_US, STAGES


def test_a_time_on_a_bound_is_counted_below_it_and_one_beyond_the_last_above_all() -> None:
    latencies = Latencies(1)
    latencies.note(0, 1000, 1001, None)
    latencies.note(0, 0, BOUNDS_US[-1] + 1, None)

    told = latencies.told(["m"])["m"]

    assert told["pending"] == {"counts": [2, *[0] * 15], "us": 1000}
    assert told["total"] == {"counts": [0, 1, *[0] * 13, 1], "us": 1001 + BOUNDS_US[-1] + 1}


def test_a_model_that_answered_nothing_is_not_told() -> None:
    latencies = Latencies(2)
    latencies.note(1, 1, 2, (3, 4, 5, 6))
    assert set(latencies.told(["a", "b"])) == {"b"}


def test_a_reply_counts_its_own_times_and_what_no_worker_had_has_no_stages_of_one() -> None:
    replies = Replies([ModelSpec("m")], 8)
    made = Request(b"client", Tenant(), "id", 1, 10.0, 40.0, (b"body",), 4)
    replies.finished(made, "deadline_exceeded", 12.5)
    made.sent, made.slot = 10.5, 0
    result = Result(1, "ok", queue_s=0.002, preprocess_s=0.0005, forward_s=0.02, postprocess_s=0.2, frames=(b"",))
    replies.finished(made, "ok", 11.0, result=result)

    told = replies.latencies.told(["m"])["m"]

    assert {stage: sum(of["counts"]) for stage, of in told.items()} == {
        "pending": 2, "total": 2, "queue": 1, "preprocess": 1, "forward": 1, "postprocess": 1,
    }  # fmt: skip
    assert {stage: of["us"] for stage, of in told.items()} == {
        "pending": 3_000_000, "total": 3_500_000, "queue": 2000, "preprocess": 500, "forward": 20_000, "postprocess": 200_000,
    }  # fmt: skip


def test_the_books_of_64_models_with_long_names_and_high_counts_fit_into_a_message() -> None:
    names = [f"{n:02d}".ljust(128, "x") for n in range(64)]
    counts = {stage: {"counts": [1 << 40] * (len(BOUNDS_US) + 1), "us": 1 << 50} for stage in STAGES}
    codes = dict.fromkeys(("ok", *map(str, ErrorCode)), 1 << 40)
    entry = {
        "hash": "f" * 32,
        "model": names[0],
        "input_bytes": 1 << 30,
        "worker_deaths": 3,
        "refused": 1 << 30,
        "age_s": 1e9,
        "expires_in_s": 1e9,
    }
    message = {
        "latencies": dict.fromkeys(names, counts), "replied_by_model": dict.fromkeys(names, codes), "poison": [entry] * 50,
        "others": "x" * 8192,
    }  # fmt: skip
    size = len(msgpack.packb(message))
    assert size < MAX_MESSAGE_BYTES, size
