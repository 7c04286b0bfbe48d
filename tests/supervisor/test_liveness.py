"""Three facts, and what they say together."""

from __future__ import annotations

from typing import Any

import pytest

from gpupool.board import Phase, SlotRecord
from gpupool.supervisor.liveness import LivenessPolicy, Verdict, judge

POLICY = LivenessPolicy(heartbeat_timeout_s=2.0, load_timeout_s=600.0, batch_timeout_s=60.0)


def record(**changes: Any) -> SlotRecord:
    fields: dict[str, Any] = dict.fromkeys(SlotRecord.__dataclass_fields__, 0) | {
        "incarnation": 1,
        "pid": 5,
        "phase": Phase.IDLE,
    }
    return SlotRecord(**(fields | changes))


def verdict(now: float, r: SlotRecord, **options: Any) -> Verdict:
    return judge(POLICY, r, 1, now, **{"spawned_at": 0.0, "joined": True, **options})[0]


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


@pytest.mark.parametrize(
    ("name", "now", "fields", "expected"),
    [
        ("idle and beating", 100.0, {"beat_ns": ns(99.9)}, Verdict.FINE),
        ("no beat for three seconds", 103.0, {"beat_ns": ns(100.0)}, Verdict.LATE),
        (
            "starved by its own batch",
            130.0,
            {"beat_ns": ns(100.0), "phase": Phase.BATCH, "phase_deadline_ns": ns(160.0)},
            Verdict.LATE,
        ),
        (
            "beating while its batch hangs",
            161.0,
            {"beat_ns": ns(160.9), "phase": Phase.BATCH, "phase_deadline_ns": ns(160.0)},
            Verdict.STUCK,
        ),
        (
            "loading within its time",
            160.0,
            {"beat_ns": ns(159.9), "phase": Phase.LOAD, "phase_deadline_ns": ns(700.0)},
            Verdict.FINE,
        ),
        ("idle, frozen for longer than a batch may take", 163.0, {"beat_ns": ns(100.0)}, Verdict.STUCK),
        ("idle, frozen for less", 161.0, {"beat_ns": ns(100.0)}, Verdict.LATE),
    ],
)
def test_facts_and_verdicts(name: str, now: float, fields: dict[str, Any], expected: Verdict) -> None:
    assert verdict(now, record(**fields)) == expected, name


def test_a_start_that_never_ends_is_stuck() -> None:
    assert verdict(599.0, record(incarnation=0), joined=False) == Verdict.FINE
    assert verdict(601.0, record(incarnation=0), joined=False) == Verdict.STUCK


def test_the_record_of_an_older_process_says_nothing() -> None:
    assert verdict(100.0, record(incarnation=7, beat_ns=0, phase=Phase.BATCH, phase_deadline_ns=1)) == Verdict.FINE


def test_a_pause_of_the_host_is_not_held_against_anyone() -> None:
    asleep = record(beat_ns=ns(100.0), phase=Phase.BATCH, phase_deadline_ns=ns(160.0))
    assert verdict(5000.0, asleep) == Verdict.STUCK
    assert verdict(5000.0, asleep, since=5000.0) == Verdict.FINE


def test_a_phase_has_its_whole_time_anew_after_a_pause() -> None:
    """A batch that had just begun when the host stood still is not called hung as soon as it goes on."""
    batch = record(phase=Phase.BATCH, phase_since_ns=ns(100.0), phase_deadline_ns=ns(160.0), beat_ns=ns(5000.0))
    assert verdict(5001.0, batch, since=5000.0) == Verdict.FINE
    assert verdict(5059.0, batch, since=5000.0) == Verdict.LATE  # for want of a beat, which kills nobody
    assert verdict(5061.0, batch, since=5000.0) == Verdict.STUCK


def test_a_phase_that_began_after_the_pause_has_its_own_deadline() -> None:
    batch = record(phase=Phase.BATCH, phase_since_ns=ns(5010.0), phase_deadline_ns=ns(5070.0), beat_ns=ns(5071.0))
    assert verdict(5071.0, batch, since=5000.0) == Verdict.STUCK
