"""The pool's decisions: events and the time in, commands out. Reads no clock, no board, no socket; logs nothing.

Two rules remove most races. Every process of a slot has an incarnation number, and events about an older one are ignored. And all that
follows from a fault - what the router is told, batch limits, admission - is decided in the same call that learns of it.

What becomes of a slot's process stands in workers, the router's process in router_life; here is what concerns the whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, assert_never

from gpupool.exits import RESTART_CANNOT_HELP
from gpupool.exits import Exit as ExitCode

from . import events as ev
from .capacity import Capacity, Factors
from .commands import CloseListeners, Command, Quit, Report, SetLimits
from .lifecycle import Change, State
from .policy import Policy
from .recycling import Recycling
from .router_life import RouterLife
from .slot import Purpose, Slot, Step, forced
from .workers import Gate, Workers

#: At the pool's start: as often as this the router may fail to come up before the pool gives up.
_ROUTER_FIRST_TRIES: Final = 5
#: A router without a beat for so long (or the heartbeat's time-out) does not count as serving.
_ROUTER_LATE_S: Final = 1.0
#: A router without a beat for so long (or twice the heartbeat's time-out) is replaced.
_ROUTER_DEAD_S: Final = 5.0
#: The supervisor's own loop came round so late that the ages it sees are its own.
_PAUSE_S: Final = 1.0


class PoolState(StrEnum):
    """The words of the status document."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


def open_gate(_: int, __: float) -> str | None:
    """A gate that lets every start through: there are no cards to ask."""
    return None


class Pool:
    """All slots and the router of one pool. The last `overflow` of the slots do not count as its capacity."""

    def __init__(self, slots: int, policy: Policy, rng: random.Random, gate: Gate = open_gate, *, overflow: int = 0) -> None:
        self._out: list[Command] = []
        self.router = RouterLife()
        self.workers = Workers(slots, policy, overflow=overflow, router=self.router, rng=rng, gate=gate, out=self._out)
        self.slots = self.workers.slots
        self.counted = [s for s in self.slots if not s.overflow]
        self._recycling = Recycling(self.workers)
        self.capacity = Capacity(policy.degrade)
        self.ever_ready = False
        self.stop_asked_at: float | None = None
        self._drain_ends_at: float | None = None
        self._stopping_workers = False
        self._listening = True
        self._told_expect: tuple[int, int, float] | None = None
        self._told_held: set[int] = set()
        self._told_avoided: set[int] = set()
        self._told_limits = (tuple(1.0 for _ in self.slots), 1.0)
        self._quit = False

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Take one event at monotonic time `now`; return what to do, in order. After Quit nothing matters any more."""
        if self._quit:
            return []
        self._dispatch(event, now)
        self._settle(now)
        commands = list(self._out)
        self._out.clear()
        return commands

    def _dispatch(self, event: ev.Event, now: float) -> None:
        workers = self.workers
        match event:
            case ev.Started(held):
                self._out += self.router.spawn("start", now)
                for each in self.slots:
                    each.held = each.number in held
                    if each.sentence is None:
                        workers.start(each, "start", now)
            case ev.Tick(records, late_s, router_beat):
                if late_s > _PAUSE_S:
                    workers.windows_since = now
                for each in self.slots:
                    workers.tick(each, records[each.number], now)
                if router_beat is not None:
                    # Its beat has a rhythm of its own, five times a second.
                    late = max(_ROUTER_LATE_S, self.policy.liveness.heartbeat_timeout_s)
                    self._out += self.router.watch(
                        router_beat, now, late_s=late, dead_s=max(_ROUTER_DEAD_S, 2 * late), since=workers.windows_since
                    )
                self._tick_pool(now)
            case ev.RouterDeaf():
                self._out += self.router.deaf()
            case ev.WorkerSpawned(number, incarnation, pid):
                if slot := workers.current(number, incarnation):
                    slot.pid = pid
            case ev.SpawnFailed(number, incarnation, message):
                if slot := workers.current(number, incarnation):
                    workers.ended(slot, ev.Exit(None, None, f"cannot start: {message}"), now)
            case ev.WorkerLoaded(number, incarnation, info):
                if slot := workers.current(number, incarnation):
                    slot.info = dict(info)
            case ev.WorkerFailed(number, incarnation, message):
                if slot := workers.current(number, incarnation):
                    slot.failed, slot.reason = True, message
            case ev.WorkerJoined(number, incarnation):
                if slot := workers.current(number, incarnation):
                    workers.joined(slot, now)
            case ev.WorkerIdle(number):
                workers.idle(self.slots[number], now)
            case ev.WorkerSick(number, incarnation, reason):
                if (slot := workers.current(number, incarnation)) and slot.state != State.STOPPING:
                    workers.end(slot, Purpose.REPLACE, workers.gentle(), reason, now)
            case ev.RecycleAsked(number, incarnation, reason):
                if slot := workers.current(number, incarnation):
                    slot.renewal, slot.renewal_asked_at = reason, now
            case ev.WorkerExited(number, incarnation, exit_, running):
                if slot := workers.current(number, incarnation):
                    workers.exited(slot, exit_, running, now)
            case ev.RouterUp(epoch, bind):
                if epoch == self.router.epoch:
                    self._router_joined(bind, now)
            case ev.RouterExited(epoch, exit_):
                if epoch == self.router.epoch:
                    self._router_ended(exit_, now)
            case ev.RouterDrained():
                if self.stop_asked_at is not None and not self._stopping_workers:
                    self._stop_workers("drained", workers.gentle(), now)
            case ev.DrainAsked(numbers):
                for number in numbers:
                    self._drain(self.slots[number], now)
            case ev.ResumeAsked(numbers):
                for number in numbers:
                    self._resume(self.slots[number], now)
            case ev.RestartAsked(numbers, force):
                for number in numbers:
                    self._restart(self.slots[number], now, force=force)
            case ev.ReleaseAsked(numbers):
                for number in numbers:
                    self._release(self.slots[number], now)
            case ev.CardJudged(number):
                workers.judged(self.slots[number], event, now)
            case ev.CardReadmitted(number, reason):
                workers.readmitted(self.slots[number], reason, now)
            case ev.WorkerCondemned(number, reason):
                workers.condemned(self.slots[number], reason, now)
            case ev.CardThrottled(number, factor, _):
                self.slots[number].card_factor = factor
            case ev.LeakJudged(number, incarnation):
                if slot := workers.current(number, incarnation):
                    workers.leak_judged(slot, event)
            case ev.StopAsked():
                self._stop(now)
            case ev.PolicyChanged(policy):
                workers.policy = policy
                self.capacity.rules = policy.degrade
            case _:
                assert_never(event)

    # What is asked about the pool.

    @property
    def policy(self) -> Policy:
        """The rules in force."""
        return self.workers.policy

    @property
    def ready_count(self) -> int:
        """Workers that take work, those for overflow left out."""
        return sum(s.works for s in self.counted)

    @property
    def ready(self) -> bool:
        """Whether the pool can serve."""
        return (
            self.router.up and not self.router.late and self.stop_asked_at is None and self.ready_count >= self.policy.min_ready
        )

    @property
    def degraded(self) -> bool:
        """Whether fewer workers serve than are configured."""
        return self.ready_count < len(self.counted)

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
        if any(s.coming for s in self.counted) or self.ready_count:
            return PoolState.STARTING
        if any(s.held for s in self.counted):
            return PoolState.DRAINING
        return PoolState.FAILED

    def refusal(self, verb: str, number: int) -> str | None:
        """Say why a verb cannot be done on a slot now, if so."""
        slot = self.slots[number]
        if self.stop_asked_at is not None:
            return "the pool is stopping"
        if verb in ("restart", "resume") and slot.state in (State.QUARANTINED, State.LOST, State.UNKILLABLE):
            needs = f" (needs {slot.needs})" if slot.needs else ""
            return f"worker {number} is {slot.state}: {slot.reason or 'its card must be seen to first'}{needs}"
        return None

    # The router and the passing of time.

    def _tick_pool(self, now: float) -> None:
        if self._drain_ends_at is not None and now >= self._drain_ends_at:
            # The rest is answered before anything is killed: a stuck model must not leave its callers without a word.
            self._out += self.router.stop("drain limit reached", now)
            self._stop_workers("drain limit reached", forced(), now)
        if self.stop_asked_at is None:
            self._recycling.tick(now)
        self._out += self.router.tick(now, again=self.stop_asked_at is None)

    def _router_joined(self, bind: Sequence[str], now: float) -> None:
        self.router.bound(bind, now)
        self._told_expect = None
        self._told_held.clear()
        self._told_avoided.clear()
        for slot in self.slots:
            if slot.obituary:
                # It may have joined this router, and died, before we knew that there was one to tell.
                self.workers.tell("lost", "still dead", **slot.obituary)
        if self.stop_asked_at is not None:
            self.workers.tell("drain", "still stopping")

    def _router_ended(self, exit_: ev.Exit, now: float) -> None:
        stopping = self.stop_asked_at is not None
        for slot in self.slots:
            slot.joined = False
        commands = self.router.ended(now, again=not stopping)
        if stopping:
            if not self._stopping_workers:
                self._stop_workers("the router is gone", self.workers.gentle(), now)
            return
        fields = (("code", exit_.code), ("signal", exit_.signal), ("cause", exit_.cause), ("stderr", list(exit_.stderr)))
        self._out.append(Report("router_exited", None, "error", fields))
        if not self.ever_ready and self.router.failures >= _ROUTER_FIRST_TRIES:
            self._finish(ExitCode.FAILED, f"the router does not start: {exit_.cause}")
            return
        self._out += commands

    # Operators.

    def _drain(self, slot: Slot, now: float) -> None:
        slot.held = True
        if slot.state == State.READY:
            slot.change(Change.HOLD, now)
        elif slot.state in (State.BACKING_OFF, State.PARKED):
            slot.due_at = None
            slot.change(Change.REST, now)

    def _resume(self, slot: Slot, now: float) -> None:
        slot.held = False
        if slot.state in (State.DRAINING, State.DRAINED) and slot.purpose == Purpose.NONE:
            slot.change(Change.RELEASE, now)
        elif slot.state == State.STOPPING and slot.purpose == Purpose.REST:
            slot.purpose = Purpose.RESTART
        elif slot.purpose == Purpose.REST and slot.state == State.DRAINING:
            slot.purpose, slot.drain_ends_at = Purpose.NONE, None
            slot.change(Change.RELEASE, now)
        elif slot.state in (State.PARKED, State.STOPPED, State.BACKING_OFF):
            slot.history.deaths.clear()
            slot.history.step, slot.on_probation = 0, False
            self.workers.start(slot, "resume asked", now)

    def _restart(self, slot: Slot, now: float, *, force: bool) -> None:
        workers = self.workers
        if slot.state in (State.PARKED, State.STOPPED, State.BACKING_OFF):
            workers.start(slot, "restart asked", now)
        elif slot.state == State.STOPPING:
            slot.purpose = Purpose.RESTART
            if force:
                workers.force(slot, now)
        elif force:
            workers.end(slot, Purpose.RESTART, forced(), "forced restart asked", now)
        elif slot.serving:
            workers.finish_first(slot, Purpose.RESTART, "restart asked", now)
        else:
            workers.end(slot, Purpose.RESTART, workers.gentle(), "restart asked", now)

    def _release(self, slot: Slot, now: float) -> None:
        slot.held = True
        if slot.state == State.STOPPING:
            slot.purpose = Purpose.REST if slot.purpose != Purpose.CARD else Purpose.CARD
        elif slot.serving:
            self.workers.finish_first(slot, Purpose.REST, "its device is to be released", now)
        elif slot.alive and slot.state != State.UNKILLABLE:
            self.workers.end(slot, Purpose.REST, self.workers.gentle(), "its device is to be released", now)
        elif not slot.alive:
            slot.due_at = None
            slot.change(Change.REST, now)

    def _stop(self, now: float) -> None:
        workers = self.workers
        if self.stop_asked_at is not None:
            if self._drain_ends_at is not None:
                self._drain_ends_at = now
                self._tick_pool(now)
            return
        self.stop_asked_at, self._drain_ends_at = now, now + self.policy.drain_timeout_s
        workers.stopping = True
        if self.router.up:
            workers.tell("drain", "stop asked")
        for slot in self.slots:
            if slot.state in (State.STARTING, State.LOADING, State.DRAINED):
                workers.end(slot, Purpose.REST, workers.gentle(), "stop asked", now)
            elif not slot.alive:
                slot.change(Change.REST, now)
        if not self.router.up:
            self._stop_workers("stop asked", workers.gentle(), now)

    def _stop_workers(self, reason: str, ladder: list[Step], now: float) -> None:
        self._stopping_workers, self._drain_ends_at = True, None
        for slot in self.slots:
            if slot.alive and slot.state != State.UNKILLABLE:
                self.workers.end(slot, Purpose.REST, list(ladder), reason, now)

    # What follows from the whole.

    def _settle(self, now: float) -> None:
        if self.router.up:
            self._tell_router_of_slots()
        if self.stop_asked_at is not None:
            if self._listening and not self.router.running:
                self._listening = False
                self._out.append(CloseListeners("no router runs, and none will"))
            if not any(s.alive and s.state != State.UNKILLABLE for s in self.slots):
                self._stopping_workers = True
                if self.router.running:
                    self._out += self.router.stop("all workers have stopped", now)
                else:
                    self._finish(ExitCode.OK, "stopped")
            return
        self.ever_ready = self.ever_ready or self.ready
        if not self.ever_ready and all(
            s.state == State.PARKED and (s.last_exit or {}).get("code") in RESTART_CANNOT_HELP for s in self.counted
        ):
            self._finish(ExitCode.BAD_CONFIG, "no worker can start with this configuration")
            return
        healthy = sum(s.healthy for s in self.counted)
        factors = self.capacity.update(healthy, len(self.counted), now)
        limits = (tuple(factors.batch * s.card_factor for s in self.slots), factors.window)
        if limits != self._told_limits:
            self._told_limits = limits
            self._out.append(SetLimits(*limits, f"{healthy} of {len(self.counted)} workers are healthy"))
        # After the router's own restart those that serve are still on their way to it.
        coming = sum(s.coming or (s.serving and not s.joined) for s in self.counted)
        expect = (self.ready_count, coming, factors.batch)
        if self.router.up and self._told_expect != expect:
            self._told_expect = expect
            # Fewer workers drain the same backlog more slowly: its bounds shrink with the batch limits.
            self.workers.tell("expect", ready=self.ready_count, coming=coming, admission=factors.batch)

    def _tell_router_of_slots(self) -> None:
        """Bring the router's view of every slot to what its state asks for: said in one place, so that no way to it is forgotten."""
        held = {s.number for s in self.slots if s.wants_hold}
        avoided = {s.number for s in self.slots if s.wants_avoid}
        for number in sorted(held ^ self._told_held):
            self.workers.tell("hold" if number in held else "release", str(self.slots[number].state), slot=number)
        for number in sorted(avoided ^ self._told_avoided):
            self.workers.tell("avoid", str(self.slots[number].state), slot=number, on=number in avoided)
        self._told_held, self._told_avoided = held, avoided

    def _finish(self, code: ExitCode, reason: str) -> None:
        self._quit = True
        self._out.append(Quit(code, reason))
