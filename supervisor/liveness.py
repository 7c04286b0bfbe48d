"""Is a worker alive, late or stuck? Judged from its board record and the clock; judged facts, not acts.

Two facts besides the process's existence: a beat (a side thread: the interpreter lives) and progress against the deadline of the present
phase (the work moves). A busy worker may starve its beat (a C call that holds the interpreter lock), and a hung CUDA call leaves the beat
running: so a missing beat alone only stops new work, and only a passed deadline condemns. An idle phase has no deadline; there a
beat that stays away for a whole batch time beyond its limit stands for it, since nothing but a stopped process explains that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpupool.board import Phase, SlotRecord


class Verdict(StrEnum):
    """What the record says about a worker."""

    FINE = "fine"
    LATE = "late"  # no beat: no new work until it is back
    STUCK = "stuck"  # no progress past the deadline: to be replaced


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """The numbers of [supervision] that rule liveness, in seconds."""

    heartbeat_timeout_s: float
    load_timeout_s: float
    batch_timeout_s: float
    #: How late the supervisor itself notices; a deadline is not held against a worker before this has passed too.
    grace_s: float = 0.25


def judge(
    policy: LivenessPolicy,
    record: SlotRecord,
    incarnation: int,
    now: float,
    *,
    spawned_at: float,
    joined: bool,
    since: float = 0.0,
) -> tuple[Verdict, str]:
    """Judge one worker.

    Args:
        policy: the limits.
        record: its board record.
        incarnation: the process that is meant; a record of another one says nothing yet.
        now: monotonic seconds, the same clock as the record's.
        spawned_at: when the process was started.
        joined: it has registered with the router, so loading is over.
        since: windows start no earlier than this (the host was paused, the supervisor itself was late).

    Returns:
        The verdict and its reason.
    """
    if not joined and now > max(spawned_at, since) + policy.load_timeout_s:
        return Verdict.STUCK, f"not ready {policy.load_timeout_s:g} s after its start"
    if record.incarnation != incarnation:
        return Verdict.FINE, "not attached yet"
    deadline, began = record.phase_deadline_ns / 1e9, record.phase_since_ns / 1e9
    # After a pause the phase gets its whole time anew: how much of it had been used when the host stood still is not known.
    if deadline and record.phase != Phase.IDLE and now > max(deadline, since + max(0.0, deadline - began)) + policy.grace_s:
        return Verdict.STUCK, f"no progress in {record.phase.name.lower()} past its deadline"
    beat_age = now - max(record.beat_ns / 1e9, since, spawned_at)
    if beat_age <= policy.heartbeat_timeout_s:
        return Verdict.FINE, ""
    if record.phase == Phase.IDLE and beat_age > policy.heartbeat_timeout_s + policy.batch_timeout_s:
        return Verdict.STUCK, f"idle without a beat for {beat_age:.1f} s"
    return Verdict.LATE, f"no beat for {beat_age:.1f} s"
