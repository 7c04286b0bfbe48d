"""The whole pool in virtual time: supervisor, router and workers, each with its real core, and clients, operators and fate around.

Here stand the lines between them and what can be done to them. Who must keep which promise stands in `promises`.
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgpack

from gpupool import wire
from gpupool.board import Phase
from gpupool.link import Hello, Result, Work
from gpupool.spec import BatchingSpec, ModelSpec
from gpupool.supervisor.capacity import DegradeRule
from gpupool.supervisor.events import Exit, LeakJudged, StopAsked
from gpupool.supervisor.liveness import LivenessPolicy
from gpupool.supervisor.policy import Policy
from gpupool.supervisor.restart import RestartPolicy

from .promises import Ask, Witness
from .virtual_board import BoardSlot
from .virtual_router import VirtualRouter
from .virtual_supervisor import VirtualSupervisor
from .virtual_time import Timeline
from .virtual_worker import VirtualWorker

#: A stand-still as long as this is surely noticed as one, and held against nobody.
_NOTICED_S = 1.3

POLICY = Policy(
    restart=RestartPolicy(delays_s=(0.0, 0.5, 2.0), stable_after_s=20.0, max_restarts=4, period_s=60.0, half_open_s=20.0),
    liveness=LivenessPolicy(heartbeat_timeout_s=1.0, load_timeout_s=5.0, batch_timeout_s=2.0),
    degrade=(DegradeRule(1.0, 0.75, 0.5), DegradeRule(0.51, 0.5, 0.2)),
    drain_timeout_s=4.0,
    stop_timeout_s=1.0,
)
MODELS = (
    ModelSpec("small", batching=BatchingSpec(max_batch=4, min_batch=2, max_queue=8)),
    ModelSpec("large", batching=BatchingSpec(max_batch=6, min_batch=3, max_queue=8)),
)
#: From the wish to stop to the end: drain, SIGTERM, SIGKILL, the router's own end, and a margin for ticks and messages.
GRACES_S = POLICY.drain_timeout_s + POLICY.stop_timeout_s + 10.0 + 2 * 2.5 + 1.0


class Universe:
    """Everything. `run` and `steps` let time pass; what clients, operators and fate do are methods too."""

    def __init__(self, slots: int, seed: int, *, overflow: int = 0, max_attempts: int = 2) -> None:
        self.rng = random.Random(seed)
        self.time = Timeline(self.rng)
        self.overflow = overflow  # beside `slots`, the last ones
        self.policy = replace(POLICY, recycle_on_leak=True)
        self.models, self.token, self.max_attempts = MODELS, "secret", max_attempts
        self.witness = Witness(POLICY.restart, max_attempts)
        self.board = [BoardSlot() for _ in range(slots + overflow)]
        self.router_epoch, self.router_beat = 0, 0.0  # on the board, too
        self.supervisor = VirtualSupervisor(self, slots + overflow, random.Random(seed))
        self.pool = self.supervisor.pool
        self.router: VirtualRouter | None = None
        self.workers: dict[int, VirtualWorker] = {}  # the latest of each slot
        self.loads_fail: set[int] = set()
        self.loads_hang: set[int] = set()
        self.spawns_fail: set[int] = set()
        self.healed = False
        self.overflowed = 0  # requests that went to overflow workers
        self.quit_code: int | None = None
        self.stood_until = 0.0  # the end of the latest stand-still that the supervisor must have noticed
        self._stalled_s = 0.0
        self._died_at: dict[tuple[int, int], float] = {}
        self._unsent: list[tuple[bytes, list[bytes]]] = []  # what clients say while no router is there
        self.supervisor.begin()

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        until = self.time.now + seconds
        while self.time.step(until):
            pass

    def steps(self, count: int) -> None:
        """Let so many events happen, to stop in the narrowest of moments."""
        for _ in range(count):
            self.time.step(self.time.now + 1.0)

    def living(self, slot: int) -> VirtualWorker | None:
        """The slot's process, if there is one."""
        worker = self.workers.get(slot)
        return worker if worker is not None and worker.alive else None

    # Lines between the processes

    def worker_says(self, worker: VirtualWorker, kind: bytes, payload: Hello | list[int] | list[Result]) -> None:
        """A worker sends to whichever router is there."""
        if (router := self.router) is not None and router.alive:
            peer = worker.peer
            self.time.send(worker.name, router, lambda: router.from_worker(worker, kind, peer, payload))

    def router_sends(self, router: VirtualRouter, peer: bytes, kind: bytes, payload: list[Work] | list[int]) -> bool:
        """A router sends to a worker. That one is dead shows at once, or a moment later: then the message is lost without a word."""
        slot, incarnation, _ = (int(part) for part in peer.split(b"."))
        worker = self.living(slot)
        if worker is None or worker.incarnation != incarnation:
            return self.rng.random() < 0.5
        sent_at = self.time.now
        self.time.send(router.name, worker, lambda: worker.hear(kind, router.epoch, payload, sent_at))
        return True

    def router_hears(self, router: VirtualRouter, frames: list[bytes], now: float) -> None:
        """A router reads a client's message."""
        header = wire.parse_header(frames[0])
        if header.type == "infer":
            ask = self.witness.asks[str(header.id)]
            ask.heard_by, ask.deadline = router.epoch, now + ask.timeout_s

    def _to_router(self, client: bytes, frames: list[bytes]) -> None:
        if (router := self.router) is None or not router.alive:
            self._unsent.append((client, frames))
        else:
            self.time.send(client.decode(), router, lambda: router.from_client(client, frames))

    # Starts and ends of processes

    def router_starts(self, epoch: int) -> None:
        """A router process begins; it is bound a moment later."""
        assert self.router is None, "two routers"
        router = self.router = VirtualRouter(self, epoch)
        self.router_epoch = epoch
        self.time.after(self.rng.uniform(0.02, 0.5), router, router.begin)
        unsent, self._unsent = self._unsent, []
        for client, frames in unsent:
            self._to_router(client, frames)

    def router_dies(self) -> None:
        """The router is killed, with all that it held and all that was on its way to it."""
        if (router := self.router) is not None and router.alive:
            self.router_exits(router, Exit(None, "SIGKILL", "killed"))
            self.witness.router_died(router.epoch)
            waiting = {wire.parse_header(frames[0]).id for _, frames in self._unsent}
            for ask in self.witness.asks.values():
                ask.orphan |= not ask.heard_by and ask.id not in waiting

    def router_exits(self, router: VirtualRouter, exit_: Exit) -> None:
        """The router's process ends; its channel is read until the supervisor has seen it."""
        router.alive = False
        supervisor = self.supervisor
        self.time.send(f"pidfd of {router.name}", supervisor, lambda: supervisor.router_ended(router.epoch, exit_))

    def worker_died(self, worker: VirtualWorker, signal: str | None, code: int | None) -> None:
        """A worker's process has ended."""
        slot, incarnation, supervisor = worker.slot, worker.incarnation, self.supervisor
        self._died_at[slot, incarnation] = self.watched_s
        for job in worker.jobs.values():
            job.ask.unseen += job.begun and not job.rows_running
        self.witness.died(slot, incarnation, worker.asked, signal, self.time.now)
        exit_ = Exit(code, signal, signal or f"exit code {code}")
        self.time.send(f"pidfd of {worker.name}", supervisor, lambda: supervisor.worker_ended(slot, incarnation, exit_))

    def dead_for(self, slot: int, incarnation: int) -> float:
        """How long the supervisor could have known of a process's end; 0 for a living one."""
        now = self.watched_s
        return now - self._died_at.get((slot, incarnation), now)

    @property
    def watched_s(self) -> float:
        """Time in which neither the host nor the supervisor stood still."""
        return self.time.now - self.time.paused_s - self._stalled_s

    def quit(self, code: int) -> None:
        """The supervisor ends, and nothing outlives it."""
        self.quit_code = code
        for slot in self.workers:
            if (worker := self.living(slot)) is not None:
                worker.asked = "stop asked"
                worker.die(signal="SIGKILL")
        self.router_dies()
        for ask in self.witness.asks.values():
            ask.orphan |= not ask.heard_by

    # What clients and operators do

    def ask(
        self, kind: str = "ok", *, model: int = 0, rows: int = 1, priority: int = 5, timeout_s: float = 5.0, retry: bool = True
    ) -> Ask:
        """A client sends a request."""
        number = len(self.witness.asks) + 1
        ask = Ask(f"r{number}", f"client {number % 3}".encode(), kind, model, rows, priority, timeout_s, retry)
        ask.orphan = self.quit_code is not None
        self.witness.asks[ask.id] = ask
        fields = {
            "id": ask.id, "model": MODELS[model].name, "many": rows > 1, "priority": priority, "retry": retry,
            "timeout_ms": int(timeout_s * 1000),
        }  # fmt: skip
        body: bytes = msgpack.packb([ask.id] * rows)
        self._to_router(ask.client, [wire.pack_request(fields), body])
        return ask

    def cancel(self, index: int) -> None:
        """A client no longer wants one of the requests that are open."""
        if open_ := self.witness.unanswered():
            ask = open_[index % len(open_)]
            self._to_router(ask.client, [wire.pack_request({"type": "cancel", "id": ask.id})])

    def operate(self, verb: str, slot: int) -> None:
        """An operator's command: drain, resume, restart or force."""
        self.time.send("operator", self.supervisor, lambda: self.supervisor.asked(verb, slot))

    def stop(self) -> None:
        """Somebody asks the pool to stop."""
        self.time.send("operator", self.supervisor, lambda: self.supervisor.feed(StopAsked()))

    # What fate does

    def kill(self, slot: int, code: int | None = None) -> None:
        """A worker is killed by somebody outside the pool, or ends with an exit code."""
        if (worker := self.living(slot)) is not None and not worker.in_kernel:
            if code:
                worker.asked = None
            worker.die(signal=None if code is not None else "SIGKILL", code=code)

    def doom(self, slot: int) -> None:
        """A worker will die at the end of its next batch, its answers with it."""
        if (worker := self.living(slot)) is not None:
            worker.doomed = True

    def leak(self, slot: int) -> None:
        """A worker's memory is seen to grow."""
        if (worker := self.living(slot)) is not None:
            judged = LeakJudged(
                slot, worker.incarnation, "host", suspected=True, bytes_per_hour=1, growth_bytes=1, worked_s=1.0
            )
            self.time.send("board", self.supervisor, lambda: self.supervisor.feed(judged))

    def freeze(self, slot: int) -> None:
        """A worker is stopped (SIGSTOP, a debugger, swapping)."""
        if (worker := self.living(slot)) is not None:
            worker.frozen = True

    def thaw(self, slot: int) -> None:
        """It goes on."""
        if (worker := self.living(slot)) is not None and not worker.in_kernel:
            self.time.thaw(worker)

    def stick(self, slot: int) -> None:
        """A worker is caught in a driver call: nothing moves and no signal ends it."""
        if (worker := self.living(slot)) is not None:
            worker.in_kernel = worker.frozen = True

    def let_go(self, slot: int) -> None:
        """The driver lets go."""
        if (worker := self.living(slot)) is not None and worker.in_kernel:
            worker.in_kernel = False
            if worker.kill_waits:
                worker.die(signal="SIGKILL")
            self.time.thaw(worker)

    def freeze_router(self) -> None:
        """The router is stopped."""
        if self.router is not None:
            self.router.frozen = True

    def thaw_router(self) -> None:
        """It goes on."""
        if (router := self.router) is not None and router.frozen:
            router.thawed_at = self.watched_s
            self.time.thaw(router)

    def pause(self, seconds: float) -> None:
        """The whole host stands still."""
        self.time.pause(seconds)
        if seconds > _NOTICED_S:
            self.stood_until = self.time.now

    def stall(self, seconds: float) -> None:
        """The supervisor alone stands still."""
        self.supervisor.frozen = True
        self.run(seconds)
        self._stalled_s += seconds
        if seconds > _NOTICED_S:
            self.stood_until = self.time.now
        self.time.thaw(self.supervisor)

    def heal(self) -> None:
        """All faults end, and operators give everything free."""
        self.healed = True
        for faults in (self.loads_fail, self.loads_hang, self.spawns_fail):
            faults.clear()
        self.thaw_router()
        for slot in range(len(self.board)):
            if (worker := self.living(slot)) is not None:
                worker.doomed = False
            self.let_go(slot)
            self.thaw(slot)
        self.run(0.1)
        for slot in range(len(self.board)):
            self.operate("resume", slot)

    @property
    def whole(self) -> bool:
        """Whether every worker takes work, in the eyes of the supervisor and of the router, within the full limits."""
        if self.router is None or not self.pool.ready or not all(s.works for s in self.pool.slots):
            return False
        fleet = self.router.core.workers.fleet
        works = all(b.phase in (Phase.IDLE, Phase.BATCH) and b.set_batch == b.set_window == 1.0 for b in self.board)
        return works and not fleet.held and len(fleet.usable + fleet.overflow) == len(self.board)
