"""A pretended router process in virtual time: a real core, and around it what the router's loop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpupool import wire
from gpupool.link import RESULTS, Hello, Result, Work, WorkFlag
from gpupool.router.balance import Reading
from gpupool.router.commands import Event, Quit, Reply, SendTickets, SendWork, Tell
from gpupool.router.core import Core
from gpupool.router.requests import Request
from gpupool.spec import RouterSpec
from gpupool.supervisor.events import Exit

from .virtual_time import Actor
from .virtual_worker import BEAT_S, VirtualWorker

if TYPE_CHECKING:
    from .universe import Universe

MAX_PENDING = 40
#: Every request names a deadline, so nobody is refused for it: it is what overflow workers get work by.
TARGET_DELAY_MS = 100.0
_LAST_WORDS_S = 0.003  # as in the router's loop
_READING_S = 0.002
#: As soon as the supervisor knows of an end the router must, too.
_LONGEST_UNKNOWN_S = 1.0


class VirtualRouter(Actor):
    """One process. `held` and `dead` are what it was told."""

    def __init__(self, universe: Universe, epoch: int) -> None:
        super().__init__(f"router {epoch}")
        self.epoch = epoch
        self.bound = False
        self._bound_at = 0.0
        self.held: set[int] = set()
        self.dead: set[tuple[int, int]] = set()
        self._u = universe
        spec = RouterSpec(
            "p", epoch, universe.token, ("tcp://127.0.0.1:0",), "ipc://w", len(universe.board), universe.models,
            max_pending=MAX_PENDING, max_attempts=universe.max_attempts, overflow=universe.overflow, target_delay_ms=TARGET_DELAY_MS,
        )  # fmt: skip
        self.core = Core(spec)
        self.thawed_at = 0.0  # in watched time
        self._gone: set[bytes] = set()  # peers that have said BYE
        self._workers: list[Callable[[float], None]] = []
        self._clients: list[tuple[bytes, list[bytes]]] = []
        self._turn_asked = False
        self._read_at = 0.0
        self._armed_at = float("inf")
        self._quitting = False

    def begin(self) -> None:
        self.bound = True
        self._bound_at = self._u.watched_s
        self._tell({"t": "up", "bind": ["tcp://127.0.0.1:1"]})
        self._beat()
        self._ask_turn()

    def _beat(self) -> None:
        self._u.router_beat = self._u.time.now
        self._u.time.after(BEAT_S, self, self._beat)

    def from_client(self, client: bytes, frames: list[bytes]) -> None:
        self._clients.append((client, frames))
        self._ask_turn()

    def from_worker(self, worker: VirtualWorker, kind: bytes, peer: bytes, payload: Hello | list[int] | list[Result]) -> None:
        if worker.last_words_lost:
            return
        workers = self.core.workers

        def handle(now: float) -> None:
            if isinstance(payload, Hello):
                self._gone.discard(peer)
                workers.hello(peer, payload, now)
            elif kind == RESULTS:
                workers.results(peer, [r for r in payload if isinstance(r, Result)], now)
            else:
                self._gone.add(peer)
                workers.bye(peer, [t for t in payload if isinstance(t, int)], now)

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
            self._u.router_exits(self, Exit(0, None, "exit code 0"))

    def _send_work(self, peer: bytes, requests: list[Request], now: float) -> None:
        slot, incarnation = (int(part) for part in peer.split(b".")[:2])
        assert (slot, incarnation) not in self.dead, "work for a lost worker"
        # Not only as it was told: what an operator wished a while ago must have been told to this router by now.
        wished_at = self._u.supervisor.held.get(slot, self._u.watched_s)
        known_s = self._u.watched_s - max(wished_at, self._bound_at)
        stood = self._u.supervisor.frozen or self._u.watched_s < self.thawed_at + _LONGEST_UNKNOWN_S
        assert known_s <= _LONGEST_UNKNOWN_S or stood or self.core.workers.fleet.all_held, "a drain is forgotten"
        assert peer not in self._gone, "work for a worker that has said goodbye"
        assert all(r.flags & WorkFlag.ALONE for r in requests if r.deaths), "a suspect is not run alone"
        assert slot not in self.held or self.core.workers.fleet.all_held, "work for a held worker"
        if self.core.workers.fleet.by_slot[slot].overflow:
            self._u.overflowed += len(requests)
            assert self.core.workers.overflow.on(now), "overflow without pressure"
            assert not any(r.deaths for r in requests), "a suspect goes to an overflow worker"
            assert slot not in self.held, "work for a held overflow worker"
        works = [Work(r.ticket, r.model, r.flags, r.rows, r.timeout_s, r.priority, r.frames) for r in requests]
        assert all(w.timeout_s > 0 for w in works), "work past its deadline is sent"
        if not self._u.router_sends(self, peer, b"W", works):
            self.core.workers.send_failed(peer, [r.ticket for r in requests], now)

    def _tell(self, message: dict[str, Any]) -> None:
        supervisor = self._u.supervisor
        self._u.time.send(self.name, supervisor, lambda: supervisor.from_router(self, message))

    def _check(self) -> None:
        ledger = self.core.ledger
        assert ledger.accounts.balanced(ledger.pending), self.core.stats(0.0)
        assert len(ledger.all_open()) == ledger.pending + ledger.accounts.in_flight
        assert len(ledger.deadlines) == len(ledger.all_open())
        assert ledger.pending <= MAX_PENDING
        for worker in self.core.workers.fleet.by_slot.values():
            dead_s = self._u.dead_for(worker.slot, worker.incarnation)
            stood = self._u.supervisor.frozen or self._u.watched_s < self.thawed_at + _LONGEST_UNKNOWN_S
            assert dead_s <= _LONGEST_UNKNOWN_S or stood, (
                f"nobody has told the router that {worker.slot}.{worker.incarnation} is dead"
            )
