"""Which requests are traced, and what is kept of them."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.link import Marks, WorkFlag
from gpupool.router.tracing import MAX_ATTEMPTS, Attempt, Finished, Parent, Sampler, parse_traceparent, waiting_times
from gpupool.spec import TraceSpec
from support.router_world import RouterWorld

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
FLAGGED = f"00-{TRACE:032x}-00f067aa0ba902b7-01"
UNFLAGGED = FLAGGED[:-1] + "0"
ALL = TraceSpec("http://c/", sample=1.0)
NONE = TraceSpec("http://c/", sample=0.0)


def sampler(spec: TraceSpec) -> Sampler:
    return Sampler(spec, random.Random(1))


@pytest.mark.parametrize(
    "text",
    [
        "", "t", FLAGGED.upper(), FLAGGED[:-1], FLAGGED + "0", FLAGGED + "-more", "ff" + FLAGGED[2:], f" {FLAGGED}", FLAGGED + "\n",
        f"00-{0:032x}-00f067aa0ba902b7-01", f"00-{TRACE:032x}-{0:016x}-01", f"cc{FLAGGED[2:]}.more",
    ],
)  # fmt: skip
def test_a_malformed_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_traceparent_is_read_that_of_later_versions_too() -> None:
    assert parse_traceparent(FLAGGED) == Parent(TRACE, 0x00F067AA0BA902B7, True)
    assert parse_traceparent(UNFLAGGED) == Parent(TRACE, 0x00F067AA0BA902B7, False)
    assert parse_traceparent(FLAGGED[:-2] + "fe") == Parent(TRACE, 0x00F067AA0BA902B7, False)
    assert parse_traceparent("cc" + FLAGGED[2:] + "-what comes later") == parse_traceparent(FLAGGED)


@given(
    st.text("0123456789abcdefABCDEF-\n é", max_size=60)
    | st.from_regex(re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.?"))
)
def test_what_is_read_as_a_parent_has_both_ids(text: str) -> None:
    parent = parse_traceparent(text)

    assert parent is None or (0 < parent.trace_id < 1 << 128 and 0 < parent.span_id < 1 << 64)


def test_chance_traces_about_the_share_and_live() -> None:
    ours = sampler(TraceSpec("http://c/"))
    traced = sum(ours.begin(None, 0.0) is not None for _ in range(20_000))
    ours.set_sample(1.0)

    assert 140 < traced < 260  # 1 % of them, and the seed is fixed
    assert all((trace := ours.begin(None, 0.0)) and trace.sampled and trace.parent_id == 0 for _ in range(100))


def test_without_an_endpoint_nothing_is_traced_and_the_id_is_known_for_the_log() -> None:
    ours = sampler(TraceSpec(sample=1.0))
    trace = ours.begin(FLAGGED, 0.0)

    assert ours.begin(None, 0.0) is None
    assert trace is not None
    assert (trace.hex, trace.sampled) == (f"{TRACE:032x}", False)


def test_the_clients_flag_decides_either_way() -> None:
    yes, no = sampler(NONE).begin(FLAGGED, 0.0), sampler(ALL).begin(UNFLAGGED, 0.0)

    assert yes is not None
    assert no is not None
    assert (yes.sampled, yes.trace_id, yes.parent_id) == (True, TRACE, 0x00F067AA0BA902B7)
    assert yes.span_id not in (0, yes.parent_id)
    assert not no.sampled


def test_clients_that_flag_everything_are_heeded_so_often_a_second() -> None:
    ours = sampler(TraceSpec("http://c/", sample=0.0, max_flagged_per_s=10))
    traced = [ours.begin(FLAGGED, 5.0 + n / 100) for n in range(250)]

    assert sum(t is not None and t.sampled for t in traced) == 30
    assert ours.stats() == {"malformed": 0, "unheeded": 220}


def test_a_malformed_traceparent_is_ignored_and_counted() -> None:
    ours = sampler(ALL)
    trace = ours.begin("nonsense", 0.0)

    assert trace is not None
    assert (trace.parent_id, ours.malformed) == (0, 1)


def test_a_request_that_is_traced_leaves_all_its_times() -> None:
    world = RouterWorld(traces=ALL)
    peer = world.join()
    marks = Marks(100.1, 0.0, 100.2, 100.4, 100.4, 100.5, 7, 100.2, 3, 0, "min")

    world.ask("a", body=b"\x07\x08", priority=7)
    (work,) = world.held[peer].values()
    assert work.flags & WorkFlag.TRACED
    world.now += 0.5
    world.answer(peer, batch_size=3, preprocess_s=0.0, forward_s=0.2, marks=marks)

    (finished,) = world.exported
    assert finished == Finished(finished.trace, "a", "echo", "1", 0, "ok", 1, 1, 7, 2, 100.0, 100.0, 100.5, 3, 0.0, 0.2, marks)
    assert world.records[-1]["trace_id"] == finished.trace.hex


def test_each_dispatch_that_came_to_nothing_is_told() -> None:
    world = RouterWorld(traces=ALL)
    world.join(0)
    world.core.workers.expect(1, 1)
    world.ask("a")
    world.now += 1.0
    world.lose(0, running=[])
    world.now += 2.0
    peer = world.join(1)
    world.now += 4.0
    world.answer(peer)

    (finished,) = world.exported
    assert finished.trace.attempts == [Attempt(0, 100.0, 101.0, "crash")]
    assert (finished.arrived, finished.sent, finished.ended) == (100.0, 103.0, 107.0)
    assert waiting_times(100.0, finished.trace.attempts, 103.0, 107.0) == [(100.0, 100.0), (101.0, 103.0)]


def test_what_waits_at_its_end_was_sent_nowhere() -> None:
    world = RouterWorld(traces=ALL)
    world.join(0)
    world.core.workers.expect(1, 1)
    world.ask("a", timeout_ms=5000)
    world.now += 1.0
    world.lose(0, running=[])
    world.advance(5.0)

    (finished,) = world.exported
    assert (finished.code, finished.sent) == ("deadline_exceeded", 0.0)
    assert waiting_times(100.0, finished.trace.attempts, 0.0, finished.ended) == [(100.0, 100.0), (101.0, 106.0)]


def test_a_refusal_is_traced_and_takes_part_in_its_callers_trace() -> None:
    world = RouterWorld(traces=NONE)
    world.ask("a", model="none", trace=FLAGGED)
    world.ask("b", model="none")
    world.ask("c", model="none", trace=UNFLAGGED)

    assert [(f.request_id, f.model, f.code, f.trace.trace_id) for f in world.exported] == [("a", "", "unknown_model", TRACE)]
    assert [r.get("trace_id") for r in world.records] == [f"{TRACE:032x}", None, f"{TRACE:032x}"]


def test_attempts_that_are_remembered_are_bounded() -> None:
    trace = sampler(ALL).begin(None, 0.0)
    assert trace is not None
    for n in range(10 * MAX_ATTEMPTS):
        trace.came_back(0, n, n + 0.5, "bye")

    assert len(trace.attempts) == MAX_ATTEMPTS


def test_a_reload_changes_the_share() -> None:
    world = RouterWorld(traces=NONE)
    world.join()
    world.ask("a")
    world.core.settings({"trace_sample": 1.0})
    world.ask("b")

    assert [r.trace is not None for held in world.held.values() for r in held.values()] == [False, True]
