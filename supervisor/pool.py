"""The pool's decisions: events and the time in, commands out. Reads no clock, no board, no socket; logs nothing.

Two rules remove most races. Every process of a slot has an incarnation number, and events about an older one are ignored. And all that
follows from a fault - what the router is told, batch limits, admission - is decided in the same call that learns of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, assert_never

from gpupool.board import Phase, SlotRecord
from gpupool.exits import RESTART_CANNOT_HELP
from gpupool.exits import Exit as ExitCode

from . import events as ev
from .capacity import Capacity, DegradeRule, Factors
from .commands import Command, Quit, Report, SetLimits, SignalWorker, SpawnWorker
from .lifecycle import COMING, Change, State
from .liveness import LivenessPolicy, Verdict, judge
from .restart import Park, RestartPolicy, Retry, after_death
from .router_life import RouterLife
from .slot import Purpose, Slot, Step, forced, gentle, hung

#: At the pool's start: as often as this the router may fail to bind before the pool gives up.
_ROUTER_FIRST_TRIES: Final = 5
#: The supervisor's own loop came round so late that the ages it sees are its own.
_PAUSE_S: Final = 1.0


class PoolState(StrEnum):
    """The words of the status document."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Policy:
    """The configured rules the pool decides by."""

    restart: RestartPolicy
    liveness: LivenessPolicy
    degrade: Sequence[DegradeRule] = ()
    min_ready: int = 1
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0


class Pool:
    """All slots and the router of one pool."""

    def __init__(self, slots: int, policy: Policy, rng: random.Random) -> None:
        self.policy = policy
        self.slots = [Slot(n) for n in range(slots)]
        self.capacity = Capacity(policy.degrade)
        self.router = RouterLife()
        self.ever_ready = False
        self.stop_asked_at: float | None = None
        self._rng = rng
        self._windows_since = 0.0
        self._drain_ends_at: float | None = None
        self._stopping_workers = False
        self._told_expect: tuple[int, int] | None = None
        self._told_hold: set[int] = set()
        self._told_factors = Factors()
        self._quit = False
        self._out: list[Command] = []

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Take one event at monotonic time `now`; return what to do, in order. After Quit nothing matters any more."""
        self._out = []
        if self._quit:
            return self._out
        match event:
            case ev.Started():
                self._out += self.router.spawn("start")
                for each in self.slots:
                    self._spawn(each, "start", now)
            case ev.Tick(records, late_s):
                if late_s > _PAUSE_S:
                    self._windows_since = now
                for each in self.slots:
                    self._tick(each, records[each.number], now)
                self._tick_pool(now)
            case ev.WorkerSpawned(number, incarnation, pid):
                if slot := self._current(number, incarnation):
                    slot.pid = pid
            case ev.SpawnFailed(number, incarnation, message):
                if slot := self._current(number, incarnation):
                    self._ended(slot, ev.Exit(None, None, f"cannot start: {message}"), now)
            case ev.WorkerLoaded(number, incarnation, info):
                if slot := self._current(number, incarnation):
                    slot.info = dict(info)
            case ev.WorkerFailed(number, incarnation, message):
                if slot := self._current(number, incarnation):
                    slot.reason = message
            case ev.WorkerJoined(number, incarnation):
                if slot := self._current(number, incarnation):
                    self._joined(slot, now)
            case ev.WorkerIdle(number):
                self._idle(self.slots[number], now)
            case ev.WorkerSick(number, incarnation, reason):
                if (slot := self._current(number, incarnation)) and slot.state != State.STOPPING:
                    self._end(slot, Purpose.REPLACE, gentle(self.policy.stop_timeout_s), reason, now)
            case ev.WorkerExited(number, incarnation, exit_, running):
                if slot := self._current(number, incarnation):
                    # An operator's wish excuses only the end that it leads to: not one before any signal was sent, nor a crash after.
                    blame = slot.purpose in (Purpose.NONE, Purpose.REPLACE) or slot.serving or exit_.disorderly
                    reason = slot.reason or exit_.cause
                    slot.obituary = {
                        "slot": number, "incarnation": incarnation, "running": running, "blame": blame, "reason": reason,
                    }  # fmt: skip
                    self._tell("lost", reason, **slot.obituary)
                    self._ended(slot, exit_, now)
            case ev.RouterUp(epoch, bind):
                if epoch == self.router.epoch:
                    self._router_joined(bind, now)
            case ev.RouterExited(epoch, exit_, message):
                if epoch == self.router.epoch:
                    self._router_ended(exit_, message, now)
            case ev.RouterDrained():
                if self.stop_asked_at is not None and not self._stopping_workers:
                    self._stop_workers("drained", gentle(self.policy.stop_timeout_s), now)
            case ev.DrainAsked(numbers):
                for number in numbers:
                    self._drain(self.slots[number], now)
            case ev.ResumeAsked(numbers):
                for number in numbers:
                    self._resume(self.slots[number], now)
            case ev.RestartAsked(numbers, force):
                for number in numbers:
                    self._restart(self.slots[number], now, force=force)
            case ev.StopAsked():
                self._stop(now)
            case ev.PolicyChanged(policy):
                self.policy = policy
                self.capacity.rules = policy.degrade
            case _:
                assert_never(event)
        self._settle(now)
        return self._out

    # What is asked about the pool.

    @property
    def ready_count(self) -> int:
        """Workers that take work."""
        return sum(s.state == State.READY and s.joined for s in self.slots)

    @property
    def ready(self) -> bool:
        """Whether the pool can serve."""
        return self.router.up and self.stop_asked_at is None and self.ready_count >= self.policy.min_ready

    @property
    def degraded(self) -> bool:
        """Whether fewer workers serve than are configured."""
        return self.ready_count < len(self.slots)

    @property
    def factors(self) -> Factors:
        """Shares of batch and window in force."""
        return self.capacity.now_in_force

    @property
    def state(self) -> PoolState:
        """The pool in one word."""
        if self.stop_asked_at is not None:
            return PoolState.STOPPING if self._stopping_workers else PoolState.DRAINING
        if self.ready:
            return PoolState.READY
        if any(s.state in COMING or s.purpose == Purpose.RESTART for s in self.slots) or self.ready_count:
            return PoolState.STARTING
        if any(s.held for s in self.slots):
            return PoolState.DRAINING
        return PoolState.FAILED

    def refusal(self, verb: str, number: int) -> str | None:
        """Say why a verb cannot be done on a slot now, if so."""
        slot = self.slots[number]
        if self.stop_asked_at is not None:
            return "the pool is stopping"
        if verb in ("restart", "resume") and slot.state in (State.QUARANTINED, State.LOST, State.UNKILLABLE):
            return f"worker {number} is {slot.state}: {slot.reason or 'its card must be seen to first'}"
        return None

    # Starting and ending processes.

    def _spawn(self, slot: Slot, reason: str, now: float) -> None:
        slot.change(Change.SPAWN, now)
        slot.incarnation += 1
        slot.pid, slot.spawned_at, slot.ready_at, slot.due_at = None, now, None, None
        slot.joined = slot.late = False
        slot.purpose, slot.reason, slot.ladder, slot.batches, slot.info = Purpose.NONE, "", [], 0, {}
        self._out.append(SpawnWorker(slot.number, slot.incarnation, reason))

    def _end(self, slot: Slot, purpose: Purpose, ladder: list[Step], reason: str, now: float) -> None:
        slot.change(Change.STOP, now)
        slot.purpose, slot.reason, slot.drain_ends_at = purpose, reason, None
        slot.ladder = ladder
        self._next_step(slot, now)

    def _next_step(self, slot: Slot, now: float) -> None:
        if not slot.ladder:
            slot.change(Change.SURVIVE, now)
            self._report("worker_unkillable", slot, "error", child=slot.pid)
            return
        step = slot.ladder.pop(0)
        slot.step_ends_at = now + step.wait_s
        self._out.append(SignalWorker(slot.number, slot.incarnation, step.signal, slot.reason))

    def _ended(self, slot: Slot, exit_: ev.Exit, now: float) -> None:
        """Note the end of a process and decide what becomes of the slot."""
        stable = slot.stable(now, self.policy.restart.stable_after_s)
        was_ready = slot.ready_at is not None
        slot.last_exit = {
            "incarnation": slot.incarnation, "pid": slot.pid, "code": exit_.code, "signal": exit_.signal,
            "cause": slot.reason or exit_.cause, "planned": slot.purpose in (Purpose.RESTART, Purpose.REST),
            "lived_s": round(now - slot.spawned_at, 3), "stderr": list(exit_.stderr),
        }  # fmt: skip
        purpose, slot.pid, slot.joined, slot.late, slot.ladder = slot.purpose, None, False, False, []
        if self.stop_asked_at is not None or purpose == Purpose.REST:
            slot.change(Change.REST, now)
        elif purpose == Purpose.RESTART:
            slot.change(Change.REST, now)
            self._spawn(slot, "restart asked", now)
        elif slot.held:
            # What an operator took out of service is not brought back by a crash; `resume` starts it again.
            slot.change(Change.REST, now)
            self._report("worker_exited_while_drained", slot, "warning", **_told(slot.last_exit))
        else:
            self._crashed(slot, exit_, now, stable=stable, was_ready=was_ready)

    def _crashed(self, slot: Slot, exit_: ev.Exit, now: float, *, stable: bool, was_ready: bool) -> None:
        assert slot.last_exit is not None
        slot.crashed = True
        self._report("worker_exited", slot, "error", was_ready=was_ready, **_told(slot.last_exit))
        if exit_.code in RESTART_CANNOT_HELP:
            slot.due_at, slot.reason = None, f"exit code {exit_.code}: no restart can help"
            slot.change(Change.PARK, now)
            self._report("worker_parked", slot, "error", reason=slot.reason)
            return
        if stable:
            slot.on_probation = False
        match after_death(self.policy.restart, slot.history, now, stable=stable, rng=self._rng):
            case Retry(at) if not slot.on_probation:
                slot.change(Change.RETRY, now)
                slot.due_at = at
                if at <= now:
                    self._spawn(slot, "died", now)
            case Retry():
                self._park(slot, "died again on probation", now + self.policy.restart.half_open_s, now)
            case Park(half_open_at, reason):
                self._park(slot, reason, half_open_at, now)

    def _park(self, slot: Slot, reason: str, half_open_at: float, now: float) -> None:
        slot.change(Change.PARK, now)
        slot.due_at, slot.reason = half_open_at, reason
        self._report("worker_parked", slot, "error", reason=reason)

    # The passing of time.

    def _tick(self, slot: Slot, record: SlotRecord, now: float) -> None:
        match slot.state:
            case State.STOPPING:
                if now >= slot.step_ends_at:
                    self._next_step(slot, now)
            case State.BACKING_OFF | State.PARKED:
                if slot.due_at is not None and now >= slot.due_at and self.stop_asked_at is None:
                    slot.on_probation = slot.state == State.PARKED
                    self._spawn(slot, "half-open try" if slot.on_probation else "back-off is over", now)
            case State.STARTING | State.LOADING | State.READY | State.DRAINING | State.DRAINED:
                self._watch(slot, record, now)
            case _:
                pass

    def _watch(self, slot: Slot, record: SlotRecord, now: float) -> None:
        if record.incarnation == slot.incarnation:
            slot.batches = record.batches
            if slot.state == State.STARTING and record.phase in (Phase.LOAD, Phase.WARM_UP, Phase.IDLE):
                slot.change(Change.PROGRESS, now)
        verdict, reason = judge(
            self.policy.liveness, record, slot.incarnation, now,
            spawned_at=slot.spawned_at, joined=slot.ready_at is not None, since=self._windows_since,
        )  # fmt: skip
        if verdict == Verdict.STUCK:
            self._report("worker_stuck", slot, "error", reason=reason, phase=record.phase.name.lower())
            self._end(slot, Purpose.REPLACE, hung(), reason, now)
            return
        late = verdict == Verdict.LATE
        if late != slot.late and slot.serving:
            slot.late = late
            self._report("worker_late" if late else "worker_on_time", slot, "warning" if late else "info", reason=reason)
            self._tell("avoid", reason, slot=slot.number, on=late)
        if slot.drain_ends_at is not None and now >= slot.drain_ends_at and slot.purpose == Purpose.RESTART:
            self._end(slot, Purpose.RESTART, gentle(self.policy.stop_timeout_s), "drain limit reached", now)

    def _tick_pool(self, now: float) -> None:
        if self._drain_ends_at is not None and now >= self._drain_ends_at:
            # The rest is answered before anything is killed: a stuck model must not leave its callers without a word.
            self._out += self.router.stop("drain limit reached", now)
            self._stop_workers("drain limit reached", forced(), now)
        self._out += self.router.tick(now, again=self.stop_asked_at is None)

    # The router.

    def _router_joined(self, bind: Sequence[str], now: float) -> None:
        self.router.bound(bind, now)
        self._told_expect = None
        self._told_hold.clear()
        for slot in self.slots:
            if slot.obituary:
                # It may have joined the new router, and died, before we knew that there was one to tell.
                self._tell("lost", "still dead", **slot.obituary)
            if slot.late:
                self._tell("avoid", "still late", slot=slot.number, on=True)
        if self.stop_asked_at is not None:
            self._tell("drain", "still stopping")

    def _router_ended(self, exit_: ev.Exit, message: str, now: float) -> None:
        stopping = self.stop_asked_at is not None
        for slot in self.slots:
            slot.joined = False
        commands = self.router.ended(now, again=not stopping)
        if stopping:
            if not self._stopping_workers:
                self._stop_workers("the router is gone", gentle(self.policy.stop_timeout_s), now)
            return
        cause = message or exit_.cause
        fields = (("code", exit_.code), ("signal", exit_.signal), ("cause", cause), ("stderr", list(exit_.stderr)))
        self._out.append(Report("router_exited", None, "error", fields))
        if not self.ever_ready and self.router.failures >= _ROUTER_FIRST_TRIES:
            self._finish(ExitCode.FAILED, cause or "the router does not start")
            return
        self._out += commands

    # Workers and the router's view of them.

    def _joined(self, slot: Slot, now: float) -> None:
        slot.joined = True
        if slot.state in (State.STARTING, State.LOADING):
            slot.change(Change.JOIN, now)
            slot.ready_at, slot.crashed = now, False
            self._report("worker_ready", slot, after_s=round(now - slot.spawned_at, 3))
            if slot.held:
                slot.change(Change.HOLD, now)

    def _idle(self, slot: Slot, now: float) -> None:
        if slot.state != State.DRAINING:
            return
        if slot.purpose == Purpose.RESTART:
            self._end(slot, Purpose.RESTART, gentle(self.policy.stop_timeout_s), "restart asked", now)
        else:
            slot.change(Change.IDLE, now)

    # Operators.

    def _drain(self, slot: Slot, now: float) -> None:
        slot.held = True
        if slot.state == State.READY:
            slot.change(Change.HOLD, now)
        elif slot.state == State.BACKING_OFF:
            slot.due_at = None
            slot.change(Change.REST, now)

    def _resume(self, slot: Slot, now: float) -> None:
        slot.held = False
        if slot.state in (State.DRAINING, State.DRAINED) and slot.purpose == Purpose.NONE:
            slot.change(Change.RELEASE, now)
        elif slot.state in (State.PARKED, State.STOPPED, State.BACKING_OFF):
            slot.history.deaths.clear()
            slot.history.step, slot.on_probation = 0, False
            self._spawn(slot, "resume asked", now)

    def _restart(self, slot: Slot, now: float, *, force: bool) -> None:
        if slot.state in (State.PARKED, State.STOPPED, State.BACKING_OFF):
            self._spawn(slot, "restart asked", now)
        elif slot.state == State.STOPPING:
            slot.purpose = Purpose.RESTART
            if force:
                slot.ladder = forced()
                self._next_step(slot, now)
        elif force:
            self._end(slot, Purpose.RESTART, forced(), "forced restart asked", now)
        elif slot.state == State.READY:
            slot.change(Change.HOLD, now)
            slot.purpose, slot.drain_ends_at = Purpose.RESTART, now + self.policy.drain_timeout_s
        elif slot.state == State.DRAINING:
            slot.purpose, slot.drain_ends_at = Purpose.RESTART, now + self.policy.drain_timeout_s
        else:
            self._end(slot, Purpose.RESTART, gentle(self.policy.stop_timeout_s), "restart asked", now)

    def _stop(self, now: float) -> None:
        if self.stop_asked_at is not None:
            if self._drain_ends_at is not None:
                self._drain_ends_at = now
                self._tick_pool(now)
            return
        self.stop_asked_at, self._drain_ends_at = now, now + self.policy.drain_timeout_s
        if self.router.up:
            self._tell("drain", "stop asked")
        for slot in self.slots:
            if slot.state in (State.STARTING, State.LOADING, State.DRAINED):
                self._end(slot, Purpose.REST, gentle(self.policy.stop_timeout_s), "stop asked", now)
            elif not slot.alive:
                slot.change(Change.REST, now)
        if not self.router.up:
            self._stop_workers("stop asked", gentle(self.policy.stop_timeout_s), now)

    def _stop_workers(self, reason: str, ladder: list[Step], now: float) -> None:
        self._stopping_workers, self._drain_ends_at = True, None
        for slot in self.slots:
            if slot.alive and slot.state != State.UNKILLABLE:
                self._end(slot, Purpose.REST, list(ladder), reason, now)

    # What follows from the whole.

    def _tell_holds(self) -> None:
        """Tell the router which slots get no new work, wherever that has changed: whatever ended a wish, no slot stays held."""
        if not self.router.up:
            return
        for slot in self.slots:
            told = slot.number in self._told_hold
            # A process that is being ended is not released: it would be given work in its last moments.
            wanted = slot.held or slot.purpose == Purpose.RESTART or (told and slot.state == State.STOPPING)
            if wanted and not told:
                self._told_hold.add(slot.number)
                self._tell("hold", "drain asked" if slot.held else "restart asked", slot=slot.number)
            elif told and not wanted:
                self._told_hold.discard(slot.number)
                self._tell("release", "takes work again", slot=slot.number)

    def _settle(self, now: float) -> None:
        self._tell_holds()
        if self.stop_asked_at is not None:
            if not any(s.alive and s.state != State.UNKILLABLE for s in self.slots):
                self._stopping_workers = True
                if self.router.running:
                    self._out += self.router.stop("all workers have stopped", now)
                else:
                    self._finish(ExitCode.OK, "stopped")
            return
        self.ever_ready = self.ever_ready or self.ready
        if not self.ever_ready and all(
            s.state == State.PARKED and (s.last_exit or {}).get("code") in RESTART_CANNOT_HELP for s in self.slots
        ):
            self._finish(ExitCode.BAD_CONFIG, "no worker can start with this configuration")
            return
        factors = self.capacity.update(sum(s.healthy for s in self.slots), len(self.slots), now)
        if factors != self._told_factors:
            self._told_factors = factors
            healthy = sum(s.healthy for s in self.slots)
            self._out.append(SetLimits(factors.batch, factors.window, f"{healthy} of {len(self.slots)} workers are healthy"))
        coming = sum(s.state in COMING or s.purpose == Purpose.RESTART for s in self.slots)
        if self.router.up and self._told_expect != (self.ready_count, coming):
            self._told_expect = (self.ready_count, coming)
            self._tell("expect", ready=self.ready_count, coming=coming)

    def _finish(self, code: ExitCode, reason: str) -> None:
        self._quit = True
        self._out.append(Quit(code, reason))

    def _current(self, number: int, incarnation: int) -> Slot | None:
        slot = self.slots[number]
        return slot if slot.incarnation == incarnation and slot.alive else None

    def _tell(self, kind: str, why: str = "", /, **fields: Any) -> None:
        self._out += self.router.tell(kind, why, **fields)

    def _report(self, event: str, slot: Slot, level: str = "info", **fields: Any) -> None:
        self._out.append(Report(event, slot.number, level, tuple(fields.items())))


def _told(last_exit: dict[str, Any]) -> dict[str, Any]:
    """The fields of an exit as the log has them: there `pid` is the process that speaks."""
    return {"child" if name == "pid" else name: value for name, value in last_exit.items()}
