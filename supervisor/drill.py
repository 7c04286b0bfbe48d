"""A drill: do a fault to a worker on purpose, follow what the pool makes of it, and report what its clients would have seen.

The pool is not told: it learns of the fault as it would of a real one. What is measured are the instants at which its core learned and
decided, seen through the loop's `observer`, and the router's books. Four faults:

| kind | what is done |
| --- | --- |
| kill | SIGKILL |
| freeze | SIGSTOP: nothing in the process moves, it does not end either |
| hang | a channel message lets the work loop block for ever in its next batch, at once when nothing waits |
| oom | SIGKILL, all that a process sees of the kernel's OOM killer. No memory is used up; the cause in its exit report says so |
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from gpupool.errors import ErrorCode

from . import commands as cmd
from . import events as ev
from .control import Refused
from .lifecycle import State

if TYPE_CHECKING:
    from .loop import Supervisor
    from .pool import Pool
    from .process import Child

#: The pool ticks several times as often; this bounds the wait should nothing at all happen any more.
_LOOK_S: Final = 1.0
#: What a request is answered for reasons of its own. Every other code but ok is the pool's failure.
_OWN: Final = frozenset({
    "ok", ErrorCode.BAD_REQUEST, ErrorCode.INVALID_INPUT, ErrorCode.TOO_LARGE, ErrorCode.UNKNOWN_MODEL, ErrorCode.VERSION_MISMATCH,
    ErrorCode.CANCELLED, ErrorCode.MODEL_ERROR, ErrorCode.OUT_OF_MEMORY,
})  # fmt: skip
#: From these a worker does not come back by itself, or not soon.
_STRANDED: Final = frozenset({State.PARKED, State.STOPPED, State.UNKILLABLE, State.LOST, State.QUARANTINED})


class Kind(StrEnum):
    """The faults that can be drilled."""

    KILL = "kill"
    FREEZE = "freeze"
    HANG = "hang"
    OOM = "oom"


class Drill:
    """What is seen of one drill. Steps are noted once each, in seconds after `began`; reads no clock.

    Steps: late, stuck, exited, redispatched (when its books first showed it: at the latest then), spawned, ready (the next process takes work), full (as many workers as
    before take work, and the limits are those of before).
    """

    def __init__(self, pool: Pool, slot: int, kind: Kind, began: float) -> None:
        self.slot, self.kind, self.began = slot, kind, began
        self.incarnation = pool.slots[slot].incarnation
        self.steps: dict[str, float] = {}
        self.moved = asyncio.Event()
        self._pool = pool
        self._ready_before, self._factors_before = pool.ready_count, pool.factors

    def see(self, event: ev.Event, commands: Sequence[cmd.Command], now: float) -> None:
        """Take note of an event and of what the pool decided on it."""
        match event:
            case ev.WorkerExited(self.slot, self.incarnation):
                self.note("exited", now)
            case ev.WorkerJoined(self.slot, incarnation) if incarnation > self.incarnation:
                self.note("ready", now)
        for command in commands:
            match command:
                case cmd.Report("worker_late" | "worker_stuck" as name, self.slot) if "exited" not in self.steps:
                    self.note(name.removeprefix("worker_"), now)
                case cmd.SpawnWorker(self.slot):
                    self.note("spawned", now)
        pool = self._pool
        if "ready" in self.steps and pool.ready_count >= self._ready_before and pool.factors == self._factors_before:
            self.note("full", now)
        self.moved.set()

    def note(self, step: str, now: float) -> None:
        """Remember when a step was first seen."""
        self.steps.setdefault(step, round(now - self.began, 4))

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected."""
        slot = self._pool.slots[self.slot]
        gone = "exited" in self.steps and slot.state in _STRANDED
        return "full" in self.steps or gone or self._pool.stop_asked_at is not None

    def report(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        """Build the answer; `before` and `after` are the router's books, of one router."""
        replied = risen(before.get("replied_total", {}), after.get("replied_total", {}))
        detected = [self.steps[step] for step in ("late", "stuck", "exited") if step in self.steps]
        slot = self._pool.slots[self.slot]
        return {
            "worker": self.slot, "incarnation": self.incarnation, "kind": str(self.kind), "back": "full" in self.steps,
            "detected_s": min(detected, default=None), "redispatched_s": self.steps.get("redispatched"),
            "ready_s": self.steps.get("ready"), "full_capacity_s": self.steps.get("full"), "steps_s": self.steps,
            "replied": replied,
            "redispatched": _redispatched(before, after),
            "failed": {code: n for code, n in replied.items() if code not in _OWN},
            "state": str(slot.state), "last_exit": slot.last_exit,
        }  # fmt: skip


def risen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how much each counter has risen; those that have not are left out."""
    return {key: n - before.get(key, 0) for key, n in after.items() if n > before.get(key, 0)}


def _redispatched(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    return sum(risen(before.get("redispatched_total", {}), after.get("redispatched_total", {})).values())


def refusal(pool: Pool, slot: int, now: float, *, force: bool) -> str | None:
    """Say why a drill on a worker would teach nothing, or would cost the pool what a drill must not cost, if so."""
    drilled = pool.slots[slot]
    if pool.stop_asked_at is not None:
        return "the pool is stopping"
    if drilled.state != State.READY or not drilled.joined:
        return f"worker {slot} is {drilled.state}; only a ready worker can be drilled"
    if force:
        return None
    if pool.ready_count < 2:
        return f"worker {slot} is the only one that takes work: its requests would have to wait; --force drills it all the same"
    restart = pool.policy.restart
    recent = sum(at > now - restart.period_s for at in drilled.history.deaths)
    if recent >= restart.max_restarts:
        return f"worker {slot} has died {recent} times in {restart.period_s:g} s and would be parked; --force drills it all the same"
    return None


async def run(s: Supervisor, slot: int, kind: Kind, *, timeout_s: float) -> dict[str, Any]:
    """Do it, follow it until the pool is as before or time is up, and report.

    Raises:
        Refused: the worker went away in the moment before, or cannot be told. Nothing was done.
    """
    before, epoch = dict(await s.books()), s.pool.router.epoch
    child = s.child(slot)
    if child is None or s.pool.slots[slot].state != State.READY:
        raise Refused("refused", f"worker {slot} has just gone")
    drill = Drill(s.pool, slot, kind, time.monotonic())
    until = drill.began + timeout_s
    s.observer = drill.see
    s.log.event.warning("drill_began", worker=slot, incarnation=drill.incarnation, kind=str(kind))
    try:
        _do(kind, child)
        while not drill.over and time.monotonic() < until:
            drill.moved.clear()
            try:
                await asyncio.wait_for(drill.moved.wait(), min(_LOOK_S, max(0.0, until - time.monotonic())))
            except TimeoutError:
                continue
            # The line to the router keeps the order: books asked for after `lost` show what came of it.
            if "exited" in drill.steps and "redispatched" not in drill.steps and _redispatched(before, await s.books()):
                drill.note("redispatched", time.monotonic())
    finally:
        s.observer = None
    report = drill.report(before if s.pool.router.epoch == epoch else {}, await s.books())
    report["router_restarted"] = s.pool.router.epoch != epoch
    s.log.event.warning(
        "drill_ended", worker=slot, incarnation=drill.incarnation, kind=str(kind), back=report["back"], failed=report["failed"],
        redispatched=report["redispatched"], steps_s=report["steps_s"],
    )  # fmt: skip
    return report


def _do(kind: Kind, child: Child) -> None:
    match kind:
        case Kind.KILL:
            child.cause = "drilled: SIGKILL"
            child.signal(signal.SIGKILL)
        case Kind.FREEZE:
            # Not by Child.signal, which lets SIGCONT follow. The process is ours and not reaped, so the pid is its own.
            os.kill(child.pid, signal.SIGSTOP)
        case Kind.HANG:
            if not child.channel.send({"t": "drill", "kind": "hang"}):
                raise Refused("refused", "the worker does not read what it is told")
        case Kind.OOM:
            child.cause = "drilled: SIGKILL, as the kernel's OOM killer sends it"
            child.signal(signal.SIGKILL)
