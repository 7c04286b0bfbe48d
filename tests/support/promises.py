"""What the pool promises its clients and its operators, checked against what really happened, at the moment it happens.

The witness sees the truth: which process began what, who died and why, and every reply. It never asks the cores.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from gpupool.supervisor.restart import RestartPolicy

from .virtual_time import TRANSIT_S

#: What the supervisor says when an operator, not a fault, ends a process.
_OPERATORS_REASONS = frozenset(
    {"restart asked", "forced restart asked", "drain limit reached", "stop asked", "drained", "the router is gone", "recycled"}
)
#: How much later than its deadline a request may be begun: the router tells with a timer of 5 ms, and messages and processes
#: that come back from a pause take their time.
_LATEST_START_S = 0.1


@dataclass(eq=False)
class Ask:
    """One request of a client, and all that became of it."""

    id: str
    client: bytes
    kind: str  # ok, slow, bad, broken, poison, hang
    model: int
    rows: int
    priority: int
    timeout_s: float
    retry: bool
    heard_by: int = 0  # epoch of the router that received it
    orphan: bool = False  # its router died, or none ever heard of it: nobody owes a reply
    deadline: float = 0.0
    replies: list[dict[str, Any]] = field(default_factory=list)
    executions: int = 0
    at: set[tuple[int, int]] = field(default_factory=set)  # processes that run it now
    unseen: int = 0  # executions that no router can count, see Witness.begun
    done: bool = False  # some process ran all of it
    deaths: int = 0  # processes that died, by no operator's wish, while they ran it
    cost: int = 0  # those that died of it

    @property
    def codes(self) -> list[str]:
        """The codes of its replies."""
        return [r["code"] for r in self.replies]


class Witness:
    """Sees everything. Each method is a thing that happened and fails when a promise is broken by it."""

    def __init__(self, restart: RestartPolicy, max_attempts: int) -> None:
        self.asks: dict[str, Ask] = {}
        self.signals: dict[tuple[int, int], str] = {}  # the supervisor's latest reason for a signal, by process
        self.operator_ended: set[tuple[int, int]] = set()
        self.live: dict[int, int] = {}
        self._restart = restart
        self._max_attempts = max_attempts
        self._born: dict[int, float] = {}
        self._died: dict[int, float] = {}
        self._step: defaultdict[int, int] = defaultdict(int)

    # Processes

    def spawned(self, slot: int, incarnation: int, reason: str, now: float) -> None:
        """A process is started."""
        assert slot not in self.live, f"two processes in slot {slot}"
        if reason in ("died", "its time has come") and self._step[slot]:
            delays = self._restart.delays_s
            earliest = self._died[slot] + delays[min(self._step[slot], len(delays)) - 1]
            assert now >= earliest - 1e-6, f"slot {slot} started {earliest - now:.3f} s before its back-off was over"
        if reason == "half-open try":
            assert now >= self._died[slot] + self._restart.half_open_s - 1e-6
        self.live[slot] = incarnation
        self._born[slot] = now

    def resumed(self, slot: int) -> None:
        """An operator wants the slot to start afresh."""
        self._step[slot] = 0

    def died(self, slot: int, incarnation: int, asked: str | None, signal: str | None, now: float) -> None:
        """A process is gone. `asked`: why the supervisor had signalled it, None when it died by itself."""
        del self.live[slot]
        if asked in _OPERATORS_REASONS:
            self.operator_ended.add((slot, incarnation))
        for ask in self.asks.values():
            if (slot, incarnation) in ask.at:
                ask.at.remove((slot, incarnation))
                ask.deaths += asked not in _OPERATORS_REASONS
                # A crash, or the stack dump that a hung process is ended with: of those a request is the cause.
                ask.cost += ask.kind in ("poison", "hang") and signal in ("SIGSEGV", "SIGABRT")
                assert ask.cost <= 2, f"{ask.id} has cost {ask.cost} processes"

    def seen_dead(self, slot: int, now: float, *, counted: bool) -> None:
        """The supervisor learns of an end: its delays count from here. `counted`: nobody had wished for it."""
        self._died[slot] = now
        # A long life may have been stable: then the delays begin anew. This is the lower bound of both.
        if now - self._born.get(slot, now) >= self._restart.stable_after_s:
            self._step[slot] = 0
        self._step[slot] += counted

    def blamed(self, slot: int, incarnation: int, *, blame: bool) -> None:
        """The router is told of an end."""
        assert not (blame and (slot, incarnation) in self.operator_ended), "an operator's deed is blamed on requests"

    # Requests

    def begun(self, ask: Ask, slot: int, incarnation: int, now: float, *, first: bool, transit_s: float) -> None:
        """A process runs rows of a request; `first`: the first rows of this dispatch.

        Two things are beyond the promises. The link tells what is left of a request's time, so time that passes while the
        message stands still with its receiver is not seen. And the board names the batch that runs: an answer that is lost with its
        process, or the first rows of a request of many whose next rows waited when the process died, tell nobody of an execution.
        """
        assert self.live.get(slot) == incarnation
        if not ask.orphan and transit_s <= TRANSIT_S:
            assert now <= ask.deadline + _LATEST_START_S, f"{ask.id} begun {now - ask.deadline:.3f} s past its deadline"
        if not first:
            return
        ask.executions += 1
        ask.at.add((slot, incarnation))
        assert len(ask.at) == 1, f"{ask.id} runs at {ask.at}"
        assert ask.executions <= self._max_attempts + ask.unseen, f"{ask.id} is run for the {ask.executions}th time"
        assert ask.retry or ask.executions == 1, f"{ask.id} runs twice, against its client's word"

    def ended(self, ask: Ask, slot: int, incarnation: int, *, whole: bool) -> None:
        """A process is through with a request."""
        ask.unseen += (slot, incarnation) in ask.at  # as it is run again, the answer has reached nobody
        ask.at.discard((slot, incarnation))
        ask.done |= whole

    def replied(self, header: dict[str, Any]) -> None:
        """A router answers."""
        ask = self.asks[header["id"]]
        ask.replies.append(header)
        assert len(ask.replies) == 1, f"{ask.id} is answered {ask.codes}"
        code = header["code"]
        if code == "ok":
            assert ask.done, f"{ask.id} is answered ok and nobody has run it"
        if code == "poison":
            assert ask.deaths >= 2, f"{ask.id} is called poison after {ask.deaths} deaths"
        assert header.get("attempts", 0) <= self._max_attempts

    def router_died(self, epoch: int) -> None:
        """A router is killed, and all that it held is nobody's."""
        for ask in self.asks.values():
            if ask.heard_by == epoch and not ask.replies:
                ask.orphan = True

    def unanswered(self) -> list[Ask]:
        """Those that are still owed a reply."""
        return [a for a in self.asks.values() if not a.replies and not a.orphan]
