"""The supervisor's shell: turns what happens into events, carries the pool's commands out, and logs each. Decides nothing."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, assert_never

from gpupool.board import Board, SlotRecord, SlotWord, Word
from gpupool.config import log_spec
from gpupool.logs import LEVELS, Log
from gpupool.spec import LogSpec

from . import commands as cmd
from . import events as ev
from .card_watch import CardWatch
from .cards.topology import cores_of, cpus_of, threads_per_worker
from .children import Children
from .control import ControlServer
from .kept import Kept, KeptSlot
from .log_levels import LogLevels
from .log_place import journal_unit, log_file
from .memory_watch import MemoryWatch
from .metrics import Counts, page
from .notify import Notifier
from .pool import Pool, PoolState, open_gate
from .probes import ProbeServer
from .process import Child, thread_environment
from .slot import Purpose
from .socket_watch import SocketWatch
from .specs import (
    allocator_environment,
    clients_from,
    heap_environment,
    leak_policy_from,
    memory_from,
    policy_from,
    router_spec_from,
    worker_spec_from,
)
from .state_file import load, save, state_path
from .status import About, document, summary
from .verbs import Verbs
from .workers import END_REASONS

if TYPE_CHECKING:
    from gpupool.config import Config
    from gpupool.paths import RuntimeDir

    from .chronicle import Chronicle
    from .devices import Device
    from .instance import Instance
    from .listeners import Listeners

_PPM: Final = 1_000_000
#: What a stop may take beyond its drain and the workers' own time to end: kills, and the router's last answers.
_KILLS_S: Final = 30.0
#: How often the router's books are fetched, asked or not.
_BOOKS_EVERY_S: Final = 1.0


class Supervisor:
    """One pool's supervisor. `run` returns the exit code."""

    def __init__(
        self,
        config: Config,
        *,
        log: Log,
        instance: Instance,
        devices: Sequence[Device],
        listeners: Listeners,
        chronicle: Chronicle,
    ) -> None:
        self.config, self.log, self.chronicle = config, log, chronicle
        self.generation, self.last_reload_error = 1, None  # type: int, str | None
        self.devices = devices
        self._instance, self._listeners = instance, listeners
        self._board = Board.create(len(devices))
        self.log_levels = LogLevels(config.logs.level)
        self.set_log_levels()
        self._token = secrets.token_hex(16)
        self._events: deque[ev.Event] = deque()
        #: Shown each event with the commands that followed, after they were carried out.
        self.observer: Callable[[ev.Event, Sequence[cmd.Command], float], None] | None = None
        self._handling = False
        self._started_at, self._started_mono = time.time(), time.monotonic()
        self.notifier = Notifier()
        self._announced = False
        self._books_due = 0.0
        self._scrape_s = 0.0  # how long the last metrics page took
        self._state_path = state_path(os.environ, instance.runtime.path, config.pool.name)
        self._kept: Kept | None = None
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[int] = self._loop.create_future()
        self.children = Children(
            self._board, instance.life_fd, loop=self._loop, log=log, feed=self.feed, on_exit=self._on_worker_exit
        )
        has_gpus = any(d.kind == "gpu" for d in devices)
        self.cards = self._watch_cards() if has_gpus else None
        self._overflow = sum(d.overflow for d in devices)
        self.pool = Pool(
            len(devices),
            policy_from(config),
            random.Random(),
            self.cards.gate if self.cards else open_gate,
            overflow=self._overflow,
        )
        self._memory = MemoryWatch(
            self.pool, leak_policy_from(config), feed=self.feed, report=lambda n: self.children.reports.get(n, {}),
            card=lambda n: self.cards.view(n) if self.cards else {}, tell_router=self.children.tell_router,
        )  # fmt: skip
        self._verbs = Verbs(self)
        self._control = ControlServer(instance.runtime.control, self._verbs.table())
        self._sockets = SocketWatch(instance, listeners, self._control, feed=self.feed, log=log)
        self._probes = ProbeServer(config.http.bind, self._readiness, self._metrics) if config.http.bind else None

    async def run(self) -> int:
        """Start everything and stay until the pool has quit.

        Raises:
            OSError: the control socket or the probes' address cannot be bound.
        """
        for name in ("SIGTERM", "SIGINT"):
            self._loop.add_signal_handler(getattr(signal, name), self._on_stop_signal, name)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)
        if self._probes:
            await self._probes.start()
        await self._control.start()
        self.log.event.info(
            "pool_starting", pool=self.config.pool.name, devices=[d.id for d in self.devices], config=str(self.config.source)
        )
        self._start_pool()
        self._tick_due = time.monotonic() + self._tick_s
        self._loop.call_later(self._tick_s, self._tick)
        code = await self._done
        self._control.close()
        if self._probes:
            self._probes.close()
        self.notifier.close()
        self.log.event.info("pool_stopped", exit_code=code)
        return code

    # Events in, commands out.

    def feed(self, event: ev.Event) -> None:
        """Hand one event to the pool and carry out what follows; events that arise on the way come after it, in order."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event, now = self._events.popleft(), time.monotonic()
                commands = self.pool.handle(event, now)
                for command in commands:
                    self._carry_out(command)
                if self.observer:
                    self.observer(event, commands, now)
        finally:
            self._handling = False
        self._keep()
        self._tell_systemd()

    def _carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.SpawnWorker(slot, incarnation, reason):
                self._spawn_worker(slot, incarnation, reason)
            case cmd.SpawnRouter(epoch, reason):
                self._spawn_router(epoch, reason)
            case cmd.SignalWorker(slot, incarnation, name, reason):
                self.log.event.info("worker_signalled", worker=slot, incarnation=incarnation, signal=name, reason=reason)
                if self.cards:
                    self.cards.worker_signalled(slot)
                if child := self.children.workers.get((slot, incarnation)):
                    child.signal(signal.Signals[name])
            case cmd.KillRouter(_, reason):
                self.log.event.warning("router_killed", reason=reason)
                if self.children.router:
                    self.children.router.signal(signal.SIGKILL)
            case cmd.CloseListeners(reason):
                self.log.event.info("listeners_closed", reason=reason)
                self._listeners.close()
            case cmd.TellRouter(message, reason):
                sent = self.children.tell_router(message)
                if not sent and self.children.router:
                    self.feed(ev.RouterDeaf())
                if message["t"] != "expect":
                    self.log.event.info(
                        "router_told", message=message["t"], worker=message.get("slot"), reason=reason, sent=sent
                    )
            case cmd.SetLimits(batch, window, reason):
                for slot, factor in enumerate(batch):
                    self._board.set_slot(slot, SlotWord.SET_BATCH_PPM, round(factor * _PPM))
                    self._board.set_slot(slot, SlotWord.SET_WINDOW_PPM, round(window * _PPM))
                self.log.event.warning("limits_set", batch_factors=batch, window_factor=window, reason=reason)
            case cmd.Report(event, slot, level, fields):
                getattr(self.log.event, level)(event, **({} if slot is None else {"worker": slot}), **dict(fields))
            case cmd.Quit(code, reason):
                self.log.event.info("pool_quitting", exit_code=int(code), reason=reason)
                self.children.kill_all()
                if self.cards:
                    self.cards.stop()
                if not self._done.done():
                    self._done.set_result(int(code))
            case _:
                assert_never(command)

    def _tick(self) -> None:
        now = time.monotonic()
        late_s = now - self._tick_due
        # From now on, not from when it was due: after a pause there is one tick, not a burst of them.
        self._tick_due = now + self._tick_s
        if not self._done.done():
            self._loop.call_later(self._tick_s, self._tick)
        self.children.look(now)
        if self.cards:
            self.cards.tick(late_s)
        records = self.records()
        self.feed(ev.Tick(records, late_s, self._board.get(Word.ROUTER_BEAT_NS) / 1e9))
        self._memory.tick(records, now)
        if over := self.log_levels.expire(now):
            self.set_log_levels()
            self.log.event.info("log_levels_back", components=over, level=self.log_levels.configured)
        if now >= self._books_due and self._router_answers:
            self._books_due = now + _BOOKS_EVERY_S
            self.children.fetch_books()
        self._sockets.tick(now, workers_wanted=self.pool.router.up and self.pool.stop_asked_at is None)
        # Last, so that only a tick that went all the way counts as a sign of life.
        self.notifier.tick(now, loading=not self._announced and self.pool.state == PoolState.STARTING)

    @property
    def _tick_s(self) -> float:
        return min(self.config.supervision.heartbeat_interval_s, self.notifier.tick_within_s)

    def _spawn_worker(self, slot: int, incarnation: int, reason: str) -> None:
        device = self.devices[slot]
        near = cpus_of(device.bus, os.sched_getaffinity(0)) if device.bus else None
        spec = worker_spec_from(
            self.config, runtime=self._instance.runtime, slot=slot, incarnation=incarnation, token=self._token,
            device=device, log=self.log_spec(slot), cpus=near,
        )  # fmt: skip
        environment = {
            **thread_environment(self._threads(near), os.environ), **allocator_environment(self.config), **device.environment(),
            **heap_environment(device, self.config.memory.cpu_limit_bytes, os.environ),
        }  # fmt: skip
        if self.children.spawn_worker(spec, environment, reason) and self.cards:
            self.cards.worker_started(slot)

    def _threads(self, near: Collection[int] | None) -> int:
        """Threads for one worker: its share of the cores next to its card, or else of all."""
        if near is None:
            return threads_per_worker(len(os.sched_getaffinity(0)), len(self.devices))
        allowed = os.sched_getaffinity(0)
        sharing = sum(cpus_of(d.bus, allowed) == near for d in self.devices if d.bus)
        return threads_per_worker(cores_of(near), sharing)

    def _spawn_router(self, epoch: int, reason: str) -> None:
        spec = router_spec_from(
            self.config, runtime=self._instance.runtime, listeners=self._listeners, epoch=epoch, token=self._token, devices=self.devices, overflow=self._overflow, log=self.log_spec("router"),
        )  # fmt: skip
        self.children.spawn_router(spec, reason)

    def _watch_cards(self) -> CardWatch:
        return CardWatch(
            self.devices, loop=self._loop, feed=self.feed, start_child=self.children.start, log=self.log, log_spec=self.log_spec,
            worker_pids=self.children.worker_pids, xid_socket=self._instance.runtime.xid,
        )  # fmt: skip

    def _start_pool(self) -> None:
        """Begin where the last run of this pool left off: what an operator drained stays drained, a judged card stays judged."""
        kept, problem = load(self._state_path)
        if problem:
            self.log.event.warning("state_not_read", problem=problem)
        self._kept = kept
        if self.cards:
            self.cards.start(dict(kept.cards))
        held = [n for n, d in enumerate(self.devices) if (slot := kept.slots.get(d.id)) and slot.held]
        if held:
            self.log.event.info("drains_kept", workers=held)
        self.feed(ev.Started(held))

    def _keep(self) -> None:
        """Write down what must outlive us, when it has changed."""
        if self._kept is None or self.pool.stop_asked_at is not None:
            return
        slots = {self.devices[s.number].id: KeptSlot(held=True) for s in self.pool.slots if s.held}
        kept = Kept(slots, self.cards.health.kept() if self.cards else {})
        if kept != self._kept:
            self._kept = kept
            try:
                # On the loop on purpose: rare, small, and an operator's answer should mean that it is kept.
                save(self._state_path, kept)
            except OSError as e:
                self.log.event.warning("state_not_written", path=str(self._state_path), error=str(e))

    def _on_worker_exit(self, slot: int) -> None:
        if self.cards:
            self.cards.worker_exited(slot, asked=self.pool.slots[slot].purpose != Purpose.NONE)

    # What is asked, and what is told.

    def records(self) -> list[SlotRecord]:
        """The board as it reads now."""
        return [self._board.read(slot) for slot in range(self._board.slots)]

    def log_spec(self, component: str | int | None = None) -> LogSpec:
        """How a child logs: the router, the worker of a slot, or another one."""
        level = self.config.logs.level if component is None else self.log_levels.of(component)
        return replace(log_spec(self.config), level=level, fd=self.children.log_fd)

    def set_log_levels(self) -> None:
        """Put the levels in force: ours at once, those of the others over the board."""
        levels = self.log_levels
        self.log.set_level(LEVELS[levels.of("supervisor")])
        self._board.set(Word.LOG_LEVEL, LEVELS[levels.of("worker")])
        self._board.set(Word.ROUTER_LOG_LEVEL, LEVELS[levels.of("router")])
        for slot in range(self._board.slots):
            self._board.set_slot(slot, SlotWord.SET_LOG_LEVEL, LEVELS[levels.of(slot)])

    def child(self, slot: int) -> Child | None:
        """The process that is in a slot now."""
        return self.children.workers.get((slot, self.pool.slots[slot].incarnation))

    @property
    def runtime(self) -> RuntimeDir:
        """Where the pool's files stand."""
        return self._instance.runtime

    async def books(self) -> dict[str, Any]:
        """The router's books, fresh if it gives them in time; one that hangs is not asked, so that the answer comes at once."""
        return await self.children.books() if self._router_answers else self.children.last_books

    @property
    def _router_answers(self) -> bool:
        return self.pool.router.up and not self.pool.router.late

    async def status(self) -> dict[str, Any]:
        """The status document."""
        books = await self.books()
        about = About(
            name=self.config.pool.name, pid=os.getpid(), started_at=self._started_at, started_mono=self._started_mono,
            generation=self.generation, devices=self.devices, models=self.config.specs, last_reload_error=self.last_reload_error,
            log_file=log_file(self.config.logs.file), log_unit=journal_unit(os.environ),
        )  # fmt: skip
        views = [self.cards.view(n) if self.cards else {} for n in range(len(self.devices))]
        router = self.children.router
        drops = dict(self.log.sink.dropped)
        reports = {
            n: {**self.children.reports.get(n, {}), "oom_total": self.children.tallies.total(n).get("oom", 0)}
            for n in range(len(self.devices))
        }
        now = time.monotonic()
        status = document(
            self.pool,
            about,
            books,
            router.pid if router else None,
            self.records(),
            views,
            reports,
            self._memory.leaks(),
            now,
        )
        taken = self.children.last_books_at
        status["router"]["books_age_s"] = None if taken is None else round(now - taken, 3)
        logs = {**self.log_levels.document(now), "supervisor": self.log.report()}
        return {**status, "log_records_dropped": drops, "logs": logs}

    def apply(self, config: Config) -> None:
        """Put a configuration into force everywhere that differs from the present one in live keys only."""
        self.config, self.generation, self.last_reload_error = config, self.generation + 1, None
        self.log_levels.configured = config.logs.level
        self.set_log_levels()
        self._memory.set_policy(leak_policy_from(config))
        self.feed(ev.PolicyChanged(policy_from(config)))
        r = config.router
        batching = [asdict(m.batching) for m in config.specs]
        self.children.tell_router({
            "t": "settings", "max_pending": r.max_pending, "max_pending_bytes": r.max_pending_bytes,
            "max_client_share": r.max_client_share, "target_delay_ms": r.target_delay_ms,
            "default_timeout_ms": r.default_timeout_ms, "policy": r.policy, "batching": batching,
            "request_sample": config.logs.request_sample, "trace_sample": config.traces.sample,
            "clients": {name: asdict(client) for name, client in clients_from(config).items()},
        })  # fmt: skip
        self.children.tell_workers({"t": "settings", "batching": batching, "memory": asdict(memory_from(config))})

    def _readiness(self) -> tuple[bool, str]:
        return self.pool.ready, summary(self.pool, int(self.children.last_books.get("pending", 0)))

    async def _metrics(self) -> str:
        began = time.monotonic()
        status, children = await self.status(), self.children  # first: it fetches the router's counts
        own = self.log.forwarding()
        forwards = [f for f in (own, *children.forwarding()) if f is not None]
        text = page(status, Counts(
            ends=self.pool.workers.ends, end_reasons=END_REASONS, xids=self.cards.health.xids.totals if self.cards else {},
            workers={slot.number: children.tallies.total(slot.number) for slot in self.pool.slots}, router=children.routed(),
            log=self.log.report(), forward_up=None if own is None else all(f.get("up") for f in forwards), scrape_s=self._scrape_s,
        ))  # fmt: skip
        self._scrape_s = time.monotonic() - began
        return text

    def _tell_systemd(self) -> None:
        # First: who is told that we are ready may look at once.
        self.notifier.status(summary(self.pool, int(self.children.last_books.get("pending", 0))))
        if self.pool.ready and not self._announced:
            self._announced = True
            self.notifier.ready()
            self.log.event.info("pool_ready", after_s=round(time.monotonic() - self._started_mono, 3))

    def _on_stop_signal(self, name: str) -> None:
        self.log.event.info("stop_asked", signal=name)
        policy = self.pool.policy
        self.notifier.stopping(time.monotonic(), within_s=policy.drain_timeout_s + policy.stop_timeout_s + _KILLS_S)
        self.feed(ev.StopAsked())

    def _on_reload_signal(self) -> None:
        task = self._loop.create_task(self._verbs.reload_quietly())
        self._reloading = task  # a task without a reference may be collected before it has run
