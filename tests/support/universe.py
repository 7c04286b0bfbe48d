"""The whole pool in virtual time: the supervisor's core, the router's core and a batcher per worker, with clients and operators around.

Here stand the two shells, acting as the real ones do, and the faults. Who must keep which promise stands in `promises`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack

from gpupool import wire
from gpupool.board import Phase
from gpupool.exits import Exit as ExitCode
from gpupool.link import BYE, HELLO, RESULTS, Hello, Result, Work, WorkFlag
from gpupool.router.balance import Reading
from gpupool.router.commands import Event, Quit, Reply, SendTickets, SendWork, Tell
from gpupool.router.core import Core
from gpupool.router.requests import Request
from gpupool.spec import BatchingSpec, ModelSpec, RouterSpec
from gpupool.supervisor import commands as cmd
from gpupool.supervisor import events as ev
from gpupool.supervisor.capacity import DegradeRule
from gpupool.supervisor.liveness import LivenessPolicy
from gpupool.supervisor.policy import Policy
from gpupool.supervisor.pool import Pool
from gpupool.supervisor.restart import RestartPolicy

from .promises import Ask, Witness
from .virtual_time import Actor, Timeline
from .virtual_worker import BEAT_S, BoardSlot, VirtualWorker

TICK_S = 0.2
MAX_PENDING = 40
_LAST_WORDS_S = 0.003  # as in the router's loop
_READING_S = 0.002
#: A stand-still as long as this is surely noticed as one, and held against nobody.
_NOTICED_S = 1.3
#: As soon as the supervisor knows of an end the router must, too.
_LONGEST_UNKNOWN_S = 1.0

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


class VirtualRouter(Actor):
    """A router process: a real core, and around it what the router's loop does."""

    def __init__(self, universe: Universe, epoch: int, max_attempts: int) -> None:
        super().__init__(f"router {epoch}")
        self.epoch = epoch
        self.bound = False
        self.held: set[int] = set()  # as told
        self.dead: set[tuple[int, int]] = set()
        self._u = universe
        spec = RouterSpec(
            "p", epoch, universe.token, ("tcp://127.0.0.1:0",), "ipc://w", len(universe.board), universe.models,
            max_pending=MAX_PENDING, max_attempts=max_attempts,
        )  # fmt: skip
        self.core = Core(spec)
        self.thawed_at = 0.0
        self._gone: set[bytes] = set()  # peers that have said BYE
        self._workers: list[Callable[[float], None]] = []
        self._clients: list[tuple[bytes, list[bytes]]] = []
        self._turn_asked = False
        self._read_at = 0.0
        self._armed_at = float("inf")
        self._quitting = False

    def begin(self) -> None:
        self.bound = True
        self._tell({"t": "up", "bind": ["tcp://127.0.0.1:1"]})
        self._beat()
        self._ask_turn()

    def _beat(self) -> None:
        self._u.router_beat = self._u.time.now
        self._u.time.after(BEAT_S, self, self._beat)

    def from_client(self, client: bytes, frames: list[bytes]) -> None:
        self._clients.append((client, frames))
        self._ask_turn()

    def from_worker(self, worker: VirtualWorker, kind: bytes, peer: bytes, payload: Any) -> None:
        if worker.last_words_lost:
            return
        workers = self.core.workers
        handlers = {HELLO: workers.hello, RESULTS: workers.results, BYE: workers.bye}

        def handle(now: float) -> None:
            handlers[kind](peer, payload, now)
            if kind != RESULTS:
                (self._gone.add if kind == BYE else self._gone.discard)(peer)

        self._workers.append(handle)
        self._ask_turn()

    def from_supervisor(self, m: dict[str, Any]) -> None:
        core, workers = self.core, self.core.workers
        match m["t"]:
            case "lost":
                self._u.time.after(_LAST_WORDS_S, self, lambda: self._lost(m))
            case "hold":
                self.held.add(m["slot"])
                workers.hold(m["slot"])
            case "release":
                self.held.discard(m["slot"])
                workers.release(m["slot"])
            case "expect":
                workers.expect(m["ready"], m["coming"], m["admission"])
            case "drain":
                core.drain()
            case "stop":
                core.stop(self._u.time.now)
            case "avoid":
                workers.avoid(m["slot"], on=m["on"])
            case _:
                pass
        self._ask_turn()

    def _lost(self, m: dict[str, Any]) -> None:
        now = self._u.time.now
        self._drain_workers(now)
        self.dead.add((m["slot"], m["incarnation"]))
        running = m["running"]
        self.core.workers.lost(
            m["slot"], m["incarnation"], None if running is None else set(running), now, blame=m["blame"], reason=m["reason"],
            kind=m["kind"],
        )  # fmt: skip
        self._ask_turn()

    def _ask_turn(self) -> None:
        if self.bound and not self._turn_asked:
            self._turn_asked = True
            self._u.time.after(self._u.rng.uniform(0.0, 0.0002), self, self._turn)

    def _turn(self) -> None:
        self._turn_asked = False
        core, now = self.core, self._u.time.now
        self._drain_workers(now)
        if (due := core.next_deadline()) is not None and due <= now:
            core.tick(now)
        self._drain_clients(now)
        if core.ledger.pending and now >= self._read_at + _READING_S:
            self._read_at = now
            core.workers.observe([self._reading(slot) for slot in core.workers.fleet.by_slot], now)
        self._act(now)
        if self.alive and (due := core.next_deadline()) is not None and not now < self._armed_at <= due:
            self._armed_at = due
            self._u.time.after(max(0.0, due - now) + 0.001, self, self._turn)

    def _drain_workers(self, now: float) -> None:
        messages, self._workers = self._workers, []
        for message in messages:
            message(now)

    def _drain_clients(self, now: float) -> None:
        messages, self._clients = self._clients, []
        for client, frames in messages:
            self._u.router_hears(self, frames, now)
            self.core.message(client, frames, now)

    def _reading(self, slot: int) -> Reading:
        b = self._u.board[slot]
        return Reading(slot, b.incarnation, b.rows_running + b.rows_queued, b.limit, b.service_s)

    def _act(self, now: float) -> None:
        core = self.core
        core.dispatch(now)
        while commands := core.take_commands():
            for command in commands:
                match command:
                    case Reply(frames, _):
                        self._u.witness.replied(wire.parse_reply(frames[1]))
                    case SendWork(peer, requests):
                        self._send_work(peer, requests, now)
                    case SendTickets(peer, kind, tickets):
                        self._u.router_sends(self, peer, kind, list(tickets))
                    case Tell(message):
                        self._tell(message)
                    case Quit():
                        self._quitting = True
                    case Event():
                        pass
            core.dispatch(now)
        self._check()
        if self._quitting and self._clients:  # its last look at the socket
            self._drain_clients(now)
            self._act(now)
        elif self._quitting and self.alive:
            self._u.router_exits(self, ev.Exit(0, None, "exit code 0"))

    def _send_work(self, peer: bytes, requests: list[Request], now: float) -> None:
        slot, incarnation = (int(part) for part in peer.split(b".")[:2])
        assert (slot, incarnation) not in self.dead, "work for a lost worker"
        assert peer not in self._gone, "work for a worker that has said goodbye"
        assert all(r.flags & WorkFlag.ALONE for r in requests if r.deaths), "a suspect is not run alone"
        assert slot not in self.held or self.core.workers.fleet.all_held, "work for a held worker"
        works = [Work(r.ticket, r.model, r.flags, r.rows, r.timeout_s, r.priority, r.frames) for r in requests]
        assert all(w.timeout_s > 0 for w in works), "work past its deadline is sent"
        if not self._u.router_sends(self, peer, b"W", works):
            self.core.workers.send_failed(peer, [r.ticket for r in requests], now)

    def _tell(self, message: dict[str, Any]) -> None:
        self._u.time.send(self.name, self._u.supervisor, lambda: self._u.router_says(self, message))

    def _check(self) -> None:
        ledger = self.core.ledger
        assert ledger.accounts.balanced(ledger.pending), self.core.stats()
        assert len(ledger.open) == ledger.pending + ledger.accounts.in_flight
        assert len(ledger.deadlines) == len(ledger.open)
        assert ledger.pending <= MAX_PENDING
        for worker in self.core.workers.fleet.by_slot.values():
            dead_s = self._u.dead_for(worker.slot, worker.incarnation)
            stood = self._u.supervisor.frozen or self._u.time.now < self.thawed_at + _LONGEST_UNKNOWN_S
            assert dead_s <= _LONGEST_UNKNOWN_S or stood, (
                f"nobody has told the router that {worker.slot}.{worker.incarnation} is dead"
            )


class Universe:
    """Everything. `run` lets time pass; the other public methods are what clients, operators and fate do."""

    def __init__(self, slots: int, seed: int, *, max_attempts: int = 2) -> None:
        self.rng = random.Random(seed)
        self.time = Timeline(self.rng)
        self.policy, self.models, self.token = POLICY, MODELS, "secret"
        self.witness = Witness(POLICY.restart, max_attempts)
        self.board = [BoardSlot() for _ in range(slots)]
        self.router_epoch = 0
        self.router_beat = 0.0
        self.supervisor = Actor("supervisor")
        self.pool = Pool(slots, POLICY, random.Random(seed))
        self.router: VirtualRouter | None = None
        self.workers: dict[int, VirtualWorker] = {}
        self.loads_fail: set[int] = set()
        self.loads_hang: set[int] = set()
        self.spawns_fail: set[int] = set()
        self.healed = False
        self.quit_code: int | None = None
        self.log: list[tuple[float, Any]] = []  # commands of the supervisor, for whoever reads a failure
        self._max_attempts = max_attempts
        self._events: list[ev.Event] = []
        self._unsent: list[tuple[bytes, list[bytes]]] = []  # what clients say while no router is there
        self._held: set[int] = set()
        self._restart_asked: set[int] = set()
        self._stalled_s = 0.0
        self.stood_until = 0.0  # the end of the latest stand-still that the supervisor must have noticed
        self._died_at: dict[tuple[int, int], float] = {}
        self._pid = 100
        self._asked = 0
        self._tick_due = self.time.now + TICK_S
        self.feed(ev.Started())
        self.time.after(TICK_S, self.supervisor, self._tick)

    # Time

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        until = self.time.now + seconds
        while self.time.step(until):
            pass

    def steps(self, count: int) -> None:
        """Let so many events happen, to stop in the narrowest of moments."""
        for _ in range(count):
            self.time.step(self.time.now + 1.0)

    # The supervisor's shell

    def feed(self, event: ev.Event) -> None:
        """Hand an event to the supervisor's core and carry out what follows."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for command in self.pool.handle(self._events[0], self.time.now):
                self.log.append((self.time.now, command))
                self._carry_out(command)
            self._events.pop(0)
        assert 0 < self.pool.factors.batch <= 1
        assert 0 < self.pool.factors.window <= 1

    def _tick(self) -> None:
        late_s = self.time.now - self._tick_due
        self._tick_due = self.time.now + TICK_S
        self.time.after(TICK_S, self.supervisor, self._tick)
        self.feed(ev.Tick([b.record() for b in self.board], late_s, self.router_beat))

    def _carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.SpawnWorker(slot, incarnation, reason):
                if slot in self._restart_asked:
                    self._restart_asked.discard(slot)
                    reason = "restart asked"  # whatever it had to wait for
                if slot in self.spawns_fail:
                    self.witness.seen_dead(slot, self.time.now, counted=slot not in self._held)
                    self.feed(ev.SpawnFailed(slot, incarnation, "no memory"))
                    return
                self.witness.spawned(slot, incarnation, reason, self.time.now)
                self._pid += 1
                self.workers[slot] = VirtualWorker(self, slot, incarnation, self._pid)
                self.feed(ev.WorkerSpawned(slot, incarnation, self._pid))
            case cmd.SignalWorker(slot, incarnation, name, reason):
                worker = self.workers.get(slot)
                if worker is not None and worker.alive and worker.incarnation == incarnation:
                    worker.signal(name, reason)
            case cmd.SpawnRouter(epoch):
                assert self.router is None, "two routers"
                self.router_epoch = epoch
                router = self.router = VirtualRouter(self, epoch, self._max_attempts)
                self.time.after(self.rng.uniform(0.02, 0.5), router, router.begin)
                unsent, self._unsent = self._unsent, []
                for client, frames in unsent:
                    self._to_router(client, frames)
            case cmd.KillRouter():
                self.router_dies()
            case cmd.TellRouter(message):
                if message["t"] == "lost":
                    self.witness.blamed(message["slot"], message["incarnation"], blame=message["blame"])
                if (router := self.router) is not None and router.alive:
                    self.time.send("supervisor", router, lambda: router.from_supervisor(message))
            case cmd.SetLimits(batch, window):
                for board, share in zip(self.board, batch, strict=True):
                    board.set_batch, board.set_window = share, window
            case cmd.Quit(code):
                self._quit(code)
            case _:
                pass

    def _quit(self, code: int) -> None:
        self.quit_code = code
        for worker in list(self.workers.values()):
            worker.in_kernel = False
            worker.asked = "stop asked"
            worker.die(signal="SIGKILL")
        if self.router is not None and self.router.alive:
            self.router_dies()
        for ask in self.witness.asks.values():
            ask.orphan |= not ask.heard_by  # nobody has heard of it any more
        self.supervisor.alive = False

    def router_says(self, router: VirtualRouter, m: dict[str, Any]) -> None:
        """The supervisor reads its channel; that of a router known to be dead is closed."""
        if self.router is not router:
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

    def worker_says_loaded(self, worker: VirtualWorker) -> None:
        """A worker tells the supervisor that its models are there."""
        loaded = ev.WorkerLoaded(worker.slot, worker.incarnation, {})
        self.time.send(worker.name, self.supervisor, lambda: self.feed(loaded))

    def worker_died(self, worker: VirtualWorker, signal: str | None, code: int | None) -> None:
        """A process has ended; the supervisor reads it from its pidfd, and what it ran from the board."""
        slot, incarnation = worker.slot, worker.incarnation
        self._died_at[slot, incarnation] = self._watched_s
        for job in worker.jobs.values():
            job.ask.unseen += job.begun and not job.rows_running
        self.witness.died(slot, incarnation, worker.asked, signal, self.time.now)
        exit_ = ev.Exit(code, signal, signal or f"exit code {code}")

        def seen() -> None:
            board = self.board[slot]
            running = list(board.tickets) if board.incarnation == incarnation else []
            counted = slot not in self._held and slot not in self._restart_asked
            self.witness.seen_dead(slot, self.time.now, counted=counted)
            self.feed(ev.WorkerExited(slot, incarnation, exit_, running))

        self.time.send(f"pidfd of {worker.name}", self.supervisor, seen)

    def dead_for(self, slot: int, incarnation: int) -> float:
        """How long the supervisor could have known of a process's end; 0 for a living one."""
        now = self._watched_s
        return now - self._died_at.get((slot, incarnation), now)

    @property
    def _watched_s(self) -> float:
        """Time in which neither the host nor the supervisor stood still."""
        return self.time.now - self.time.paused_s - self._stalled_s

    # Lines between router, workers and clients

    def worker_says(self, worker: VirtualWorker, kind: bytes, payload: Hello | list[int] | list[Result]) -> None:
        """A worker sends to whichever router is there."""
        if (router := self.router) is not None and router.alive:
            peer = worker.peer
            self.time.send(worker.name, router, lambda: router.from_worker(worker, kind, peer, payload))

    def router_sends(self, router: VirtualRouter, peer: bytes, kind: bytes, payload: list[Work] | list[int]) -> bool:
        """A router sends to a worker. The end of one shows at once or a moment later: then the message is lost without a word."""
        slot, incarnation, _ = (int(part) for part in peer.split(b"."))
        worker = self.workers.get(slot)
        if worker is None or worker.incarnation != incarnation or not worker.alive:
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
        router = self.router
        if router is None or not router.alive:
            self._unsent.append((client, frames))
        else:
            self.time.send(client.decode(), router, lambda: router.from_client(client, frames))

    # What clients do

    def ask(
        self, kind: str = "ok", *, model: int = 0, rows: int = 1, priority: int = 5, timeout_s: float = 5.0, retry: bool = True
    ) -> Ask:
        """A client sends a request."""
        self._asked += 1
        ask = Ask(f"r{self._asked}", f"client {self._asked % 3}".encode(), kind, model, rows, priority, timeout_s, retry)
        self.witness.asks[ask.id] = ask
        fields = {
            "id": ask.id, "model": MODELS[model].name, "many": rows > 1, "priority": priority, "retry": retry,
            "timeout_ms": int(timeout_s * 1000),
        }  # fmt: skip
        body: bytes = msgpack.packb([ask.id] * rows)
        if self.quit_code is None:
            self._to_router(ask.client, [wire.pack_request(fields), body])
        else:
            ask.orphan = True
        return ask

    def cancel(self, index: int) -> None:
        """A client no longer wants one of the requests that are open."""
        open_ = self.witness.unanswered()
        if open_ and self.quit_code is None:
            ask = open_[index % len(open_)]
            self._to_router(ask.client, [wire.pack_request({"type": "cancel", "id": ask.id})])

    # What operators do

    def operate(self, verb: str, slot: int) -> None:
        """An operator's command, refused when the supervisor's verbs would refuse it."""
        events: dict[str, ev.Event] = {
            "drain": ev.DrainAsked([slot]), "resume": ev.ResumeAsked([slot]), "restart": ev.RestartAsked([slot]),
            "force": ev.RestartAsked([slot], force=True),
        }  # fmt: skip

        def heard() -> None:
            if self.pool.refusal("restart" if verb == "force" else verb, slot) is not None:
                return
            match verb:
                case "drain":
                    self._held.add(slot)
                case "resume":
                    self._held.discard(slot)
                    self.witness.resumed(slot)
                case _:
                    self._restart_asked.add(slot)
            self.feed(events[verb])

        self.time.send("operator", self.supervisor, heard)

    def stop(self) -> None:
        """Somebody asks the pool to stop."""
        if self.quit_code is None:
            self.time.send("operator", self.supervisor, lambda: self.feed(ev.StopAsked()))

    # What fate does

    def pause(self, seconds: float) -> None:
        """The whole host stands still."""
        self.time.pause(seconds)
        if seconds > _NOTICED_S:
            self.stood_until = self.time.now

    def doom(self, slot: int) -> None:
        """A worker dies at the end of its next batch, its answers with it."""
        if (worker := self.workers.get(slot)) is not None:
            worker.doomed = True

    def kill(self, slot: int, code: int | None = None) -> None:
        """A worker dies of itself, or of somebody outside the pool."""
        worker = self.workers.get(slot)
        if worker is not None and worker.alive and not worker.in_kernel:
            if code:
                worker.asked = None
            worker.die(signal=None if code is not None else "SIGKILL", code=code)

    def freeze_router(self) -> None:
        """The router is stopped."""
        if self.router is not None:
            self.router.frozen = True

    def thaw_router(self) -> None:
        """It goes on."""
        if (router := self.router) is not None and router.frozen:
            router.thawed_at = self.time.now
            self.time.thaw(router)

    def freeze(self, slot: int) -> None:
        """A worker is stopped (SIGSTOP, a debugger, swapping)."""
        if (worker := self.workers.get(slot)) is not None:
            worker.frozen = True

    def thaw(self, slot: int) -> None:
        """It goes on."""
        if (worker := self.workers.get(slot)) is not None and not worker.in_kernel:
            self.time.thaw(worker)

    def stick(self, slot: int) -> None:
        """A worker is caught in a driver call: nothing moves and no signal ends it."""
        if (worker := self.workers.get(slot)) is not None and worker.alive:
            worker.in_kernel = worker.frozen = True

    def let_go(self, slot: int) -> None:
        """The driver lets go."""
        worker = self.workers.get(slot)
        if worker is not None and worker.alive and worker.in_kernel:
            worker.in_kernel = False
            if worker.kill_waits:
                worker.die(signal="SIGKILL")
            self.time.thaw(worker)

    def router_dies(self) -> None:
        """The router is killed, with all that it held and all that was on its way to it."""
        if (router := self.router) is not None and router.alive:
            self.router_exits(router, ev.Exit(None, "SIGKILL", "killed"))
            self.witness.router_died(router.epoch)
            for ask in self.witness.asks.values():
                # What has not been read yet lies in the dead router's sockets, but for what waits for the next one.
                ask.orphan |= not ask.heard_by and not any(wire.parse_header(f[0]).id == ask.id for _, f in self._unsent)

    def router_exits(self, router: VirtualRouter, exit_: ev.Exit) -> None:
        """The router's process ends; its channel is read until the supervisor has seen it."""
        router.alive = False

        def seen() -> None:
            self.router = None
            self.feed(ev.RouterExited(router.epoch, exit_))

        self.time.send(f"pidfd of {router.name}", self.supervisor, seen)

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
        self.loads_fail.clear()
        self.loads_hang.clear()
        self.spawns_fail.clear()
        self.thaw_router()
        for slot in range(len(self.board)):
            if (worker := self.workers.get(slot)) is not None:
                worker.doomed = False
            self.let_go(slot)
            self.thaw(slot)
        self.run(0.1)
        for slot in range(len(self.board)):
            self.operate("resume", slot)

    @property
    def whole(self) -> bool:
        """Whether every worker takes work, in the eyes of the supervisor and of the router, within the full limits."""
        router = self.router
        if router is None or not self.pool.ready or self.pool.ready_count < len(self.board):
            return False
        usable = {w.slot for w in router.core.workers.fleet.usable}
        held = router.core.workers.fleet.held
        idle = all(b.phase in (Phase.IDLE, Phase.BATCH) for b in self.board)
        full = all(b.set_batch == 1.0 and b.set_window == 1.0 for b in self.board)
        return not held and idle and full and len(usable) == len(self.board)

    @property
    def ended_well(self) -> bool:
        """Whether the pool has ended as it should after a stop."""
        return self.quit_code == ExitCode.OK
