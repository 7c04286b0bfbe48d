"""What a drill notes of a pool in the simulated world, and when it is refused."""

from __future__ import annotations

import random
from typing import Any

from gpupool.board import Phase, SlotRecord
from gpupool.supervisor import commands as cmd
from gpupool.supervisor import events as ev
from gpupool.supervisor.capacity import DegradeRule
from gpupool.supervisor.drill import Drill, Kind, refusal, risen
from gpupool.supervisor.liveness import LivenessPolicy
from gpupool.supervisor.policy import Policy
from gpupool.supervisor.pool import Pool
from gpupool.supervisor.restart import RestartPolicy

KILLED = ev.Exit(None, "SIGKILL", "killed by SIGKILL")


class Seen:
    """A pool of ready workers whose every event is shown to a drill, as the loop does."""

    def __init__(self, workers: int = 2, *, max_restarts: int = 5, delay: float = 0.0) -> None:
        policy = Policy(
            RestartPolicy(delays_s=[delay], stable_after_s=300.0, max_restarts=max_restarts, period_s=600.0),
            LivenessPolicy(heartbeat_timeout_s=1.0, load_timeout_s=30.0, batch_timeout_s=3.0),
            degrade=[DegradeRule(1.0, 0.5, 0.5)],
        )  # fmt: skip
        self.pool = Pool(workers, policy, random.Random(1))
        self.drill: Drill | None = None
        self.feed(ev.Started(), 0.0)
        self.feed(ev.RouterUp(1, ["tcp://x"]), 0.1)
        for n in range(workers):
            self.feed(ev.WorkerSpawned(n, 1, 100 + n), 0.2)
            self.feed(ev.WorkerJoined(n, 1), 0.5)

    def feed(self, event: ev.Event, now: float) -> list[cmd.Command]:
        commands = self.pool.handle(event, now)
        if self.drill:
            self.drill.see(event, commands, now)
        return commands

    def begin(self, kind: Kind = Kind.KILL, now: float = 10.0) -> Drill:
        self.drill = Drill(self.pool, 0, kind, now)
        return self.drill

    def tick(self, now: float, *, beat_of_0: float | None = None, deadline_of_0: float = 0.0) -> None:
        beats = [now] * len(self.pool.slots)
        if beat_of_0 is not None:
            beats[0] = beat_of_0
        self.feed(ev.Tick([self._record(n, beats[n], deadline_of_0 if n == 0 else 0.0) for n in range(len(beats))]), now)

    def _record(self, number: int, beat: float, deadline: float) -> SlotRecord:
        return SlotRecord(
            incarnation=self.pool.slots[number].incarnation, pid=1, phase=Phase.BATCH if deadline else Phase.IDLE, phase_since_ns=0,
            phase_deadline_ns=int(deadline * 1e9), beat_ns=int(beat * 1e9), progress=0, running=0, queued=0, batch_limit=32,
            service_ns=1, batches=1, samples=1, last_error=0, router_epoch=1, memory_bytes=0, window_ns=0,
        )  # fmt: skip

    def report(self, replied: dict[str, int] | None = None, redispatched: dict[str, int] | None = None) -> dict[str, Any]:
        assert self.drill
        before = {"replied_total": {"ok": 10, "worker_lost": 1}, "redispatched_total": {"killed by SIGKILL": 2}}
        after = {"replied_total": replied or {"ok": 10, "worker_lost": 1}, "redispatched_total": redispatched or {}}
        return self.drill.report(before, after)


def test_a_death_is_followed_until_the_limits_are_those_of_before() -> None:
    seen = Seen()
    drill = seen.begin()

    seen.feed(ev.WorkerExited(0, 1, KILLED, [7]), 10.004)
    seen.feed(ev.WorkerSpawned(0, 2, 200), 10.01)
    assert not drill.over
    seen.feed(ev.WorkerJoined(0, 2), 10.5)
    seen.tick(12.0)
    assert not drill.over
    seen.tick(15.6)

    assert drill.over
    report = seen.report({"ok": 30, "worker_lost": 1, "model_error": 2}, {"killed by SIGKILL": 5})
    assert (report["detected_s"], report["ready_s"], report["full_capacity_s"]) == (0.004, 0.5, 5.6)
    assert report["back"]
    assert (report["redispatched"], report["failed"]) == (3, {})
    assert report["replied"] == {"ok": 20, "model_error": 2}


def test_what_the_pool_owed_an_answer_and_failed_counts_as_failed() -> None:
    seen = Seen()
    seen.begin()

    report = seen.report({"ok": 10, "worker_lost": 3, "deadline_exceeded": 1, "bad_request": 4})

    assert report["failed"] == {"worker_lost": 2, "deadline_exceeded": 1}


def test_a_missing_beat_is_noticed_before_the_process_is_ended() -> None:
    seen = Seen()
    drill = seen.begin(Kind.FREEZE)

    seen.tick(11.2, beat_of_0=10.0)
    seen.tick(14.2, beat_of_0=10.0)
    seen.feed(ev.WorkerExited(0, 1, KILLED, []), 14.3)

    assert drill.steps == {"late": 1.2, "stuck": 4.2, "exited": 4.3, "spawned": 4.3}
    assert seen.report()["detected_s"] == 1.2


def test_a_hang_is_noticed_at_the_deadline_of_its_batch() -> None:
    seen = Seen()
    seen.begin(Kind.HANG)

    seen.tick(13.4, deadline_of_0=13.0)

    assert seen.report()["detected_s"] == 3.4


def test_other_workers_and_older_processes_are_not_the_drill() -> None:
    seen = Seen(3)
    drill = seen.begin()

    seen.feed(ev.WorkerExited(1, 1, KILLED, []), 10.1)
    seen.feed(ev.WorkerJoined(1, 2), 10.3)

    assert drill.steps == {}


def test_a_worker_that_is_parked_for_it_ends_the_drill_as_not_back() -> None:
    seen = Seen(max_restarts=0)
    drill = seen.begin()

    seen.feed(ev.WorkerExited(0, 1, KILLED, []), 10.1)

    assert drill.over
    assert not seen.report()["back"]
    assert seen.report()["state"] == "parked"


def test_a_pool_that_is_stopped_meanwhile_ends_the_drill() -> None:
    seen = Seen()
    drill = seen.begin()

    seen.feed(ev.StopAsked(), 10.1)

    assert drill.over


def test_only_a_ready_worker_is_drilled_and_the_last_one_only_by_force() -> None:
    pool = Seen().pool
    assert refusal(pool, 0, 10.0, force=False) is None
    pool.handle(ev.DrainAsked([1]), 10.0)
    assert "draining" in (refusal(pool, 1, 10.0, force=True) or "")
    assert "only one" in (refusal(pool, 0, 10.0, force=False) or "")
    assert refusal(pool, 0, 10.0, force=True) is None
    pool.handle(ev.StopAsked(), 11.0)
    assert "stopping" in (refusal(pool, 0, 11.0, force=True) or "")


def test_a_worker_that_would_be_parked_is_drilled_by_force_only() -> None:
    seen = Seen(max_restarts=1)
    seen.feed(ev.WorkerExited(0, 1, KILLED, []), 10.0)
    seen.feed(ev.WorkerSpawned(0, 2, 200), 10.1)
    seen.feed(ev.WorkerJoined(0, 2), 10.5)

    assert "parked" in (refusal(seen.pool, 0, 20.0, force=False) or "")
    assert refusal(seen.pool, 0, 20.0, force=True) is None
    assert refusal(seen.pool, 0, 700.0, force=False) is None


def test_counters_that_have_not_risen_are_left_out() -> None:
    assert risen({"a": 1, "b": 2}, {"a": 1, "b": 5, "c": 1}) == {"b": 3, "c": 1}
    assert risen({"a": 9}, {"a": 2}) == {}
