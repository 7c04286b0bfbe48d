"""The slots and what becomes of their processes: starts, ends, deaths, the watch over the living, the judgement of cards.

Part of the pool's core and as pure: time comes in, commands go out through `out`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpupool.board import Phase, SlotRecord
from gpupool.exits import RESTART_CANNOT_HELP

from . import events as ev
from .commands import Command, Report, SignalWorker, SpawnWorker
from .lifecycle import Change, State
from .liveness import Verdict, judge
from .pacing import StartPacer
from .policy import Policy
from .restart import Park, Retry, after_death
from .router_life import RouterLife
from .slot import Purpose, Slot, Step, forced, gentle, hung

#: How long until a start that its card forbids is looked at again.
_GATE_RETRY_S: Final = 1.0
#: A process on a spoilt CUDA context has little to finish.
_CONDEMNED_S: Final = 2.0
#: What a death is to the router's books.
_KINDS: Final = {
    Purpose.NONE: "crash", Purpose.REPLACE: "stuck", Purpose.RESTART: "operator", Purpose.REST: "operator", Purpose.CARD: "card",
    Purpose.RECYCLE: "recycle",
}  # fmt: skip

#: The words for that there are.
END_REASONS: Final = tuple(dict.fromkeys(_KINDS.values()))

#: What is said when a process is ended because its work is done.
_FINISHED: Final = {Purpose.RESTART: "restart asked", Purpose.RECYCLE: "recycled"}

#: Says why no process may be started in a slot now, if so.
Gate = Callable[[int, float], str | None]


class Workers:
    """All slots of a pool.

    Args:
        count: how many.
        overflow: how many of these, the last ones, do not count as capacity.
        policy: the rules; replaced by a reload.
        router: who is told about them.
        rng: for jitter.
        gate: asked before every start.
        out: where commands go.
    """

    def __init__(
        self,
        count: int,
        policy: Policy,
        *,
        overflow: int,
        router: RouterLife,
        rng: random.Random,
        gate: Gate,
        out: list[Command],
    ) -> None:
        self.slots = [Slot(n, overflow=n >= count - overflow) for n in range(count)]
        self.policy = policy
        self.stopping = False
        self.ends: Counter[tuple[int, str]] = Counter()  # of processes, by slot and kind; ends of the pool itself left out
        self.windows_since = 0.0  # the host was paused until then: ages before it say nothing
        self._router = router
        self._rng = rng
        self._gate = gate
        self._pacer = StartPacer()
        self._out = out

    def current(self, number: int, incarnation: int) -> Slot | None:
        """The slot, if its present process is the one that is meant."""
        slot = self.slots[number]
        return slot if slot.incarnation == incarnation and slot.alive else None

    # Starts.

    def start(self, slot: Slot, reason: str, now: float) -> None:
        """Start a process, or have the slot wait until that is allowed."""
        refusal = self._gate(slot.number, now)
        earliest = self._pacer.earliest()
        if refusal is None and earliest <= now:
            self._pacer.take(now)
            self._spawn(slot, reason, now)
            return
        if refusal and refusal != slot.reason:
            self.report("start_postponed", slot, "warning", reason=refusal)
        slot.change(Change.WAIT, now)
        slot.reason = refusal or ""
        slot.due_at = now + _GATE_RETRY_S if refusal else earliest

    def _spawn(self, slot: Slot, reason: str, now: float) -> None:
        slot.change(Change.SPAWN, now)
        slot.incarnation += 1
        slot.pid, slot.spawned_at, slot.ready_at, slot.due_at = None, now, None, None
        slot.joined = slot.late = slot.failed = False
        slot.purpose, slot.reason, slot.ladder, slot.batches, slot.info = Purpose.NONE, "", [], 0, {}
        slot.leaks.clear()
        slot.renewal = ""
        self._out.append(SpawnWorker(slot.number, slot.incarnation, reason))

    # Ends.

    def end(self, slot: Slot, purpose: Purpose, ladder: list[Step], reason: str, now: float) -> None:
        """Make a process end, by steps that get harder."""
        slot.change(Change.STOP, now)
        slot.purpose, slot.reason, slot.drain_ends_at = purpose, reason, None
        slot.ladder = ladder
        self._next_step(slot, now)

    def gentle(self) -> list[Step]:
        """The usual way to end one."""
        return gentle(self.policy.stop_timeout_s)

    def _next_step(self, slot: Slot, now: float) -> None:
        if not slot.ladder:
            slot.change(Change.SURVIVE, now)
            self.report("worker_unkillable", slot, "error", child=slot.pid)
            return
        step = slot.ladder.pop(0)
        slot.step_ends_at = now + step.wait_s
        self._out.append(SignalWorker(slot.number, slot.incarnation, step.signal, slot.reason))

    def force(self, slot: Slot, now: float) -> None:
        """Go to the last step of an end that is under way."""
        slot.ladder = forced()
        self._next_step(slot, now)

    def finish_first(self, slot: Slot, purpose: Purpose, reason: str, now: float) -> None:
        """Take a serving slot out of service, for what comes when its work is done or the drain limit is reached."""
        if slot.state == State.READY:
            slot.change(Change.HOLD, now)
        slot.purpose, slot.reason, slot.drain_ends_at = purpose, reason, now + self.policy.drain_timeout_s

    def leak_judged(self, slot: Slot, event: ev.LeakJudged) -> None:
        """A process is suspected of a leak, or no longer."""
        (slot.leaks.add if event.suspected else slot.leaks.discard)(event.kind)
        level, name = ("warning", "memory_leak_suspected") if event.suspected else ("info", "memory_leak_over")
        self.report(
            name, slot, level, kind=event.kind, bytes_per_hour=event.bytes_per_hour, growth_bytes=event.growth_bytes,
            worked_s=event.worked_s,
        )  # fmt: skip

    def exited(self, slot: Slot, exit_: ev.Exit, running: Sequence[int] | None, now: float) -> None:
        """A process has ended: tell the router first, then decide what becomes of the slot."""
        # A wish excuses only the end that it leads to: not one before any signal was sent, nor a crash after.
        unexcused = slot.purpose in (Purpose.NONE, Purpose.REPLACE) or slot.serving or exit_.disorderly
        blame = unexcused and slot.purpose != Purpose.CARD
        reason = _why(slot, exit_)
        slot.obituary = {
            "slot": slot.number, "incarnation": slot.incarnation, "running": running, "blame": blame, "reason": reason,
            "kind": _KINDS[slot.purpose],
        }  # fmt: skip
        self.tell("lost", reason, **slot.obituary)
        self.ended(slot, exit_, now)

    def ended(self, slot: Slot, exit_: ev.Exit, now: float) -> None:
        """Note the end of a process, or that there was none, and decide what becomes of the slot."""
        stable = slot.stable(now, self.policy.restart.stable_after_s)
        last_exit = slot.last_exit = {
            "incarnation": slot.incarnation, "pid": slot.pid, "code": exit_.code, "signal": exit_.signal,
            "cause": _why(slot, exit_), "planned": slot.restarting or slot.purpose == Purpose.REST,
            "lived_s": round(now - slot.spawned_at, 3), "stderr": list(exit_.stderr),
        }  # fmt: skip
        if not self.stopping:
            self.ends[slot.number, _KINDS[slot.purpose]] += 1
        purpose, slot.pid, slot.joined, slot.late, slot.ladder = slot.purpose, None, False, False, []
        if self.stopping or purpose == Purpose.REST:
            slot.change(Change.REST, now)
        elif slot.sentence is not None:
            slot.change(slot.sentence, now)
            self.report("worker_exited", slot, "error", **_told(last_exit))
        elif slot.restarting:
            slot.change(Change.REST, now)
            self.start(slot, _FINISHED[purpose], now)
        elif slot.held:
            # What an operator took out of service is not brought back by a crash; `resume` starts it again.
            slot.change(Change.REST, now)
            self.report("worker_exited_while_drained", slot, "warning", **_told(last_exit))
        else:
            self.report("worker_exited", slot, "error", **_told(last_exit))
            self._crashed(slot, exit_, now, stable=stable)

    def _crashed(self, slot: Slot, exit_: ev.Exit, now: float, *, stable: bool) -> None:
        slot.crashed = True
        # Only where the worker said why: a model may exit with any code.
        if exit_.code in RESTART_CANNOT_HELP and slot.failed:
            self._park(slot, f"exit code {exit_.code}: no restart can help", None, now)
            return
        if stable:
            slot.on_probation = False
        match after_death(self.policy.restart, slot.history, now, stable=stable, rng=self._rng):
            case Retry(at) if not slot.on_probation:
                slot.change(Change.RETRY, now)
                slot.due_at = at
                if at <= now:
                    self.start(slot, "died", now)
            case Retry():
                self._park(slot, "died again on probation", now + self.policy.restart.half_open_s, now)
            case Park(half_open_at, reason):
                self._park(slot, reason, half_open_at, now)

    def _park(self, slot: Slot, reason: str, half_open_at: float | None, now: float) -> None:
        slot.change(Change.PARK, now)
        slot.due_at, slot.reason = half_open_at, reason
        self.report("worker_parked", slot, "error", reason=reason)

    # The watch.

    def tick(self, slot: Slot, record: SlotRecord, now: float) -> None:
        """Look at one slot as time passes."""
        match slot.state:
            case State.STOPPING:
                if now >= slot.step_ends_at:
                    self._next_step(slot, now)
            case State.BACKING_OFF | State.PARKED:
                if slot.due_at is not None and now >= slot.due_at and not self.stopping:
                    slot.on_probation = slot.on_probation or slot.state == State.PARKED
                    self.start(slot, "half-open try" if slot.on_probation else "its time has come", now)
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
            spawned_at=slot.spawned_at, joined=slot.ready_at is not None, since=self.windows_since,
        )  # fmt: skip
        if verdict == Verdict.STUCK:
            self.report("worker_stuck", slot, "error", reason=reason, phase=record.phase.name.lower())
            self.end(slot, Purpose.REPLACE, hung(), reason, now)
            return
        late = verdict == Verdict.LATE
        if late != slot.late and slot.serving:
            slot.late = late
            self.report("worker_late" if late else "worker_on_time", slot, "warning" if late else "info", reason=reason)
        if slot.drain_ends_at is not None and now >= slot.drain_ends_at and slot.purpose != Purpose.NONE:
            self.end(slot, slot.purpose, self.gentle(), "drain limit reached", now)

    # The router's view of them.

    def joined(self, slot: Slot, now: float) -> None:
        """The router has registered a process."""
        slot.joined = True
        if slot.state in (State.STARTING, State.LOADING):
            slot.change(Change.JOIN, now)
            slot.ready_at, slot.crashed = now, False
            self.report("worker_ready", slot, after_s=round(now - slot.spawned_at, 3))
            if slot.held:
                slot.change(Change.HOLD, now)

    def idle(self, slot: Slot, now: float) -> None:
        """A held process has finished what it was given."""
        if slot.state != State.DRAINING:
            return
        if slot.purpose == Purpose.NONE:
            slot.change(Change.IDLE, now)
        else:
            self.end(slot, slot.purpose, self.gentle(), _FINISHED.get(slot.purpose, "released"), now)

    # Cards.

    def condemned(self, slot: Slot, reason: str, now: float) -> None:
        """A process is spoilt by a fault of its card, which is well again."""
        if slot.alive and slot.state not in (State.STOPPING, State.UNKILLABLE):
            self.report("worker_condemned", slot, "warning", reason=reason)
            self.end(slot, Purpose.REPLACE, gentle(min(_CONDEMNED_S, self.policy.stop_timeout_s)), reason, now)

    def judged(self, slot: Slot, event: ev.CardJudged, now: float) -> None:
        """A card must not be used: its process ends now, and its requests, which are not to blame, go elsewhere."""
        slot.sentence = Change.LOSE if event.lost else Change.QUARANTINE
        slot.needs = event.needs
        self.report("card_lost" if event.lost else "card_quarantined", slot, "error", reason=event.reason, needs=event.needs)
        if slot.state == State.STOPPING:
            slot.purpose, slot.reason = Purpose.CARD, event.reason
            self.force(slot, now)
        elif slot.state != State.UNKILLABLE and slot.alive:
            self.end(slot, Purpose.CARD, forced(), event.reason, now)
        else:
            slot.reason = event.reason
            if not slot.alive:
                slot.change(slot.sentence, now)

    def readmitted(self, slot: Slot, reason: str, now: float) -> None:
        """A judged card may be used again."""
        slot.sentence, slot.needs, slot.reason = None, "", ""
        self.report("card_readmitted", slot, reason=reason)
        if slot.state in (State.QUARANTINED, State.LOST):
            slot.change(Change.READMIT, now)
            slot.last_exit = slot.last_exit and {**slot.last_exit, "cleared": reason}
            slot.history.deaths.clear()
            slot.history.step = 0
            if not slot.held and not self.stopping:
                self.start(slot, reason, now)
        elif slot.state == State.STOPPING and slot.purpose == Purpose.CARD:
            slot.purpose = Purpose.RESTART

    def tell(self, kind: str, why: str = "", /, **fields: Any) -> None:
        """Tell the router."""
        self._out += self._router.tell(kind, why, **fields)

    def report(self, event: str, slot: Slot, level: str = "info", **fields: Any) -> None:
        """Say it in the log."""
        self._out.append(Report(event, slot.number, level, tuple(fields.items())))


def _why(slot: Slot, exit_: ev.Exit) -> str:
    """Say why a process ended. One that leaves without being asked does so in good order: its own code, or somebody's SIGTERM, told it to."""
    if slot.reason:
        return slot.reason
    unasked = slot.purpose == Purpose.NONE and exit_.code == 0
    return f"{exit_.cause}, unasked: by SIGTERM from elsewhere, or by the model's own code" if unasked else exit_.cause


def _told(last_exit: dict[str, Any]) -> dict[str, Any]:
    """The fields of an exit as the log has them: there `pid` is the process that speaks."""
    return {"child" if name == "pid" else name: value for name, value in last_exit.items()}
