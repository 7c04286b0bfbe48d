"""The supervisor's process in virtual time: a real core, and around it what the supervisor's loop does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from gpupool.supervisor import commands as cmd
from gpupool.supervisor import events as ev
from gpupool.supervisor.lifecycle import State
from gpupool.supervisor.pool import Pool
from gpupool.supervisor.slot import Purpose

from .virtual_router import VirtualRouter
from .virtual_time import Actor
from .virtual_worker import VirtualWorker

if TYPE_CHECKING:
    from .universe import Universe

TICK_S = 0.2


class VirtualSupervisor(Actor):
    """The process. `held` and `restart_asked`: the operators' wishes that it has heard of."""

    def __init__(self, universe: Universe, slots: int, rng: random.Random) -> None:
        super().__init__("supervisor")
        self.pool = Pool(slots, universe.policy, rng, overflow=universe.overflow)
        self.held: dict[int, float] = {}  # since when, in watched time
        self.restart_asked: set[int] = set()
        self.log: list[tuple[float, cmd.Command]] = []  # for whoever reads a failure
        self._u = universe
        self._events: list[ev.Event] = []
        self._tick_due = universe.time.now + TICK_S

    def begin(self) -> None:
        """Start the pool and the clock."""
        self.feed(ev.Started())
        self._u.time.after(TICK_S, self, self._tick)

    def feed(self, event: ev.Event) -> None:
        """Hand an event to the core and carry out what follows; events that arise on the way come after it."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for command in self.pool.handle(self._events[0], self._u.time.now):
                self.log.append((self._u.time.now, command))
                self._carry_out(command)
            self._events.pop(0)
        assert 0 < self.pool.factors.batch <= 1
        assert 0 < self.pool.factors.window <= 1

    def _tick(self) -> None:
        u = self._u
        late_s = u.time.now - self._tick_due
        self._tick_due = u.time.now + TICK_S
        u.time.after(TICK_S, self, self._tick)
        self.feed(ev.Tick([b.record() for b in u.board], late_s, u.router_beat))

    def _carry_out(self, command: cmd.Command) -> None:
        u = self._u
        match command:
            case cmd.SpawnWorker(slot, incarnation, reason):
                self._spawn(slot, incarnation, reason)
            case cmd.SignalWorker(slot, incarnation, name, reason):
                if (worker := u.living(slot)) is not None and worker.incarnation == incarnation:
                    worker.signal(name, reason)
            case cmd.SpawnRouter(epoch):
                u.router_starts(epoch)
            case cmd.KillRouter():
                u.router_dies()
            case cmd.TellRouter(message):
                if message["t"] == "lost":
                    u.witness.blamed(message["slot"], message["incarnation"], blame=message["blame"])
                if (router := u.router) is not None and router.alive:
                    u.time.send(self.name, router, lambda: router.from_supervisor(message))
            case cmd.SetLimits(batch, window):
                for board, share in zip(u.board, batch, strict=True):
                    board.set_batch, board.set_window = share, window
            case cmd.Quit(code):
                self.alive = False
                u.quit(code)
            case cmd.Report("worker_recycled", int(slot)):
                self._recycled(slot)
            case cmd.Report("worker_recycle_called_off", int(slot)):
                self.restart_asked.discard(slot)
            case cmd.Report() | cmd.CloseListeners():
                pass

    def _recycled(self, slot: int) -> None:
        """The pool begins to renew a process by itself: as an operator's restart it is nobody's fault."""
        slots = self.pool.slots
        under_way = [s.number for s in slots if s.purpose == Purpose.RECYCLE and (s.alive or s.state == State.BACKING_OFF)]
        assert under_way == [slot], f"renewed at once: {under_way}"
        assert all(s.works for s in self.pool.counted if s.number != slot), "a worker is renewed while another is missing"
        assert self.pool.ready_count >= self.pool.policy.min_ready, "a worker is renewed that the pool needs"
        self.restart_asked.add(slot)

    def _spawn(self, slot: int, incarnation: int, reason: str) -> None:
        u = self._u
        if slot in self.restart_asked:
            self.restart_asked.discard(slot)
            reason = "restart asked"  # whatever it had to wait for
        if slot in u.spawns_fail:
            u.witness.seen_dead(slot, u.time.now, counted=slot not in self.held)
            self.feed(ev.SpawnFailed(slot, incarnation, "no memory"))
            return
        u.witness.spawned(slot, incarnation, reason, u.time.now)
        worker = u.workers[slot] = VirtualWorker(u, slot, incarnation)
        self.feed(ev.WorkerSpawned(slot, incarnation, worker.pid))

    # What it hears

    def from_router(self, router: VirtualRouter, m: dict[str, Any]) -> None:
        """Read the router's channel; that of a router known to be dead is closed."""
        if self._u.router is not router:
            return
        match m["t"]:
            case "up":
                self.feed(ev.RouterUp(router.epoch, m["bind"]))
                assert not self.pool.ready_count, "workers are called ready that a new router does not know"
            case "joined":
                self.feed(ev.WorkerJoined(m["slot"], m["incarnation"]))
            case "idle":
                self.feed(ev.WorkerIdle(m["slot"]))
            case "sick":
                self.feed(ev.WorkerSick(m["slot"], m["incarnation"], m["reason"]))
            case "drained":
                self.feed(ev.RouterDrained())

    def worker_ended(self, slot: int, incarnation: int, exit_: ev.Exit) -> None:
        """A worker's pidfd tells its end; what it ran stands on the board."""
        u, board = self._u, self._u.board[slot]
        running = list(board.tickets) if board.incarnation == incarnation else []
        u.witness.seen_dead(slot, u.time.now, counted=slot not in self.held and slot not in self.restart_asked)
        self.feed(ev.WorkerExited(slot, incarnation, exit_, running))

    def router_ended(self, epoch: int, exit_: ev.Exit) -> None:
        """The router's pidfd tells its end."""
        self._u.router = None
        self.feed(ev.RouterExited(epoch, exit_))

    def asked(self, verb: str, slot: int) -> None:
        """An operator's command, refused when it cannot be done now."""
        if self.pool.refusal("restart" if verb == "force" else verb, slot) is not None:
            return
        match verb:
            case "drain":
                self.held.setdefault(slot, self._u.watched_s)
                self.feed(ev.DrainAsked([slot]))
            case "resume":
                self.held.pop(slot, None)
                self._u.witness.resumed(slot)
                self.feed(ev.ResumeAsked([slot]))
            case _:
                self.restart_asked.add(slot)
                self.feed(ev.RestartAsked([slot], force=verb == "force"))
