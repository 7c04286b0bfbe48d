"""The pool's processes: started on command, their messages, lines and ends turned into events."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from gpupool.board import Board, Word
from gpupool.channel import Message
from gpupool.logs import Log
from gpupool.spec import RouterSpec, WorkerSpec, to_message

from . import events as ev
from .oom import CAUSE as OOM_CAUSE
from .oom import OomWatch
from .process import Child, Loop, raise_oom_score
from .tallies import Tallies

#: How long the router may take to answer; its last books are shown when it does not.
_ROUTER_TIMEOUT_S: Final = 0.3
#: What of the router's books only grows, beside what says so by its name.
_COUNTED: Final = frozenset({"replied_by_model", "latencies", "log"})
#: Characters of one line of foreign output that go into the log: its line has no room for more.
_MAX_OUTPUT: Final = 3000
#: Workers hold the models and grow: the kernel's OOM killer shall take one of them, not the router, and never us first.
_OOM_SCORE: Final = {"worker": 500, "router": 300}


class Children:
    """Router and workers of one pool, and whatever else is started for it.

    Args:
        feed: takes the events.
        on_exit: told of a worker's end before its event.
    """

    def __init__(
        self,
        board: Board,
        life_fd: int,
        *,
        loop: Loop,
        log: Log,
        feed: Callable[[ev.Event], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._board, self._life_fd, self._loop, self._log, self._feed = board, life_fd, loop, log, feed
        self._tell_exit = on_exit
        self.log_fd = os.dup(2)
        self.router: Child | None = None
        self.workers: dict[tuple[int, int], Child] = {}
        self.reports: dict[int, Message] = {}  # by slot: what its present worker last told of itself
        self.tallies = Tallies()  # what all of a slot's workers have counted
        self._router_tally = Tallies()  # what all routers have, as of one slot
        self._whose: dict[Child, tuple[int, int] | int] = {}  # a worker's (slot, incarnation), or the router's epoch
        self._oom = OomWatch()
        self.last_books: dict[str, Any] = {}
        self.last_books_at: float | None = None
        self._asked = 0
        self._waiters: dict[int, tuple[Child, asyncio.Future[Message]]] = {}  # for answers, with who was asked

    def look(self, now: float) -> None:
        """Note what the kernel's OOM killer has done by now, so that the next death can be told from it."""
        self._oom.look(now)

    # Starts and ends.

    def spawn_worker(self, spec: WorkerSpec, environment: dict[str, str], reason: str) -> bool:
        """Start a worker; False when that failed, of which an event tells."""
        slot, incarnation = spec.slot, spec.incarnation
        try:
            child = self.start("gpupool.worker", environment)
        except OSError as e:
            self._log.event.error("worker_not_spawned", worker=slot, incarnation=incarnation, error=str(e))
            self._feed(ev.SpawnFailed(slot, incarnation, str(e)))
            return False
        child.channel.send(to_message(spec))
        raise_oom_score(child.pid, _OOM_SCORE["worker"])
        self.workers[slot, incarnation] = child
        self._whose[child] = (slot, incarnation)
        self._log.event.info(
            "worker_spawned", worker=slot, incarnation=incarnation, child=child.pid, device=spec.device_id, reason=reason
        )
        self._feed(ev.WorkerSpawned(slot, incarnation, child.pid))
        return True

    def spawn_router(self, spec: RouterSpec, reason: str) -> None:
        """Start a router."""
        try:
            child = self.start("gpupool.router", {}, more_fds=(*spec.bind_fds, spec.workers_fd))
        except OSError as e:
            self._log.event.error("router_not_spawned", error=str(e))
            self.router = None
            self._feed(ev.RouterExited(spec.epoch, ev.Exit(None, None, str(e))))
            return
        self._board.set(Word.ROUTER_EPOCH, spec.epoch)
        child.channel.send(to_message(spec))
        raise_oom_score(child.pid, _OOM_SCORE["router"])
        self.router = child
        self._whose[child] = spec.epoch
        self._log.event.info("router_spawned", child=child.pid, epoch=spec.epoch, reason=reason)

    def start(
        self,
        module: str,
        environment: dict[str, str],
        *,
        more_fds: Collection[int] = (),
        on_exit: Callable[[Child], None] | None = None,
        on_readable: Callable[[Child], None] | None = None,
    ) -> Child:
        """Start a process of the pool: with board, life line and log, its output wrapped.

        Raises:
            OSError: it cannot be started.
        """
        return Child(
            module, loop=self._loop, environment=environment, board_fd=self._board.fd, life_fd=self._life_fd,
            log_fd=self.log_fd, more_fds=more_fds, on_exit=on_exit or self._on_exit,
            on_readable=on_readable or self._on_readable, on_line=self._on_line,
        )  # fmt: skip

    def kill_all(self) -> None:
        """Kill what is left when the pool quits: nothing may outlive it."""
        for child in (*self.workers.values(), *([self.router] if self.router else [])):
            child.signal(signal.SIGKILL)

    def worker_pids(self) -> list[int]:
        """Processes of workers that run now."""
        return [child.pid for child in self.workers.values()]

    # Messages to them.

    def tell_router(self, message: Message) -> bool:
        """Send the router a message; False when it cannot hear."""
        return self.router is not None and self.router.channel.send(message)

    def tell_workers(self, message: Message) -> None:
        """Send every worker a message."""
        for child in self.workers.values():
            child.channel.send(message)

    async def books(self) -> dict[str, Any]:
        """The router's books: fresh if it gives them in time, else its last ones."""
        await self.ask_router("stats")
        return self.last_books

    def fetch_books(self) -> None:
        """Have the router tell its books, so that little of what it has counted is lost should it die."""
        self.tell_router({"t": "stats", "n": 0})

    def routed(self) -> dict[str, Any]:
        """What all routers of this run have counted: their counters, `replied_by_model`, `latencies`, `log`."""
        return self._router_tally.total(0)

    def forwarding(self) -> list[Mapping[str, Any]]:
        """How the children's logs stand with Fluentd, of those that have one."""
        logs = [told.get("log") for told in (self.last_books, *self.reports.values())]
        return [log["forwarding"] for log in logs if isinstance(log, dict) and log.get("forwarding")]

    async def ask_router(self, kind: str, **fields: Any) -> Message | None:
        """Send the router a question and return its answer; None when there is none in time."""
        return None if self.router is None else await self._ask(self.router, kind, _ROUTER_TIMEOUT_S, fields)

    async def ask_worker(self, child: Child, kind: str, timeout_s: float, **fields: Any) -> Message | None:
        """Send a worker a question and return its answer; None when there is none in time."""
        return await self._ask(child, kind, timeout_s, fields)

    async def _ask(self, child: Child, kind: str, timeout_s: float, fields: Mapping[str, Any]) -> Message | None:
        self._asked += 1
        n = self._asked
        if not child.channel.send({"t": kind, "n": n, **fields}):
            return None
        waiter: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiters[n] = child, waiter
        try:
            return await asyncio.wait_for(waiter, timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            self._log.event.warning("answer_late", question=kind, timeout_s=timeout_s)
            return None
        finally:
            del self._waiters[n]

    # What comes from them.

    def _on_exit(self, child: Child) -> None:
        whose = self._whose.pop(child)
        for asked, waiter in self._waiters.values():
            if asked is child:
                waiter.cancel()
        if child.code == -signal.SIGKILL and not child.cause and self._oom.claim(time.monotonic()):
            child.cause = OOM_CAUSE
        if isinstance(whose, int):
            self.router = None
            # The next one begins new books; two routers' never stand in one document.
            self.last_books, self.last_books_at = {}, None
            self._feed(ev.RouterExited(whose, child.exit()))
            return
        del self.workers[whose]
        slot, incarnation = whose
        self.reports.pop(slot, None)
        record = self._board.read(slot)
        # A record that is not this process's names nobody: it died before it could have run anything.
        running = self._board.running(slot) if record.incarnation == incarnation else []
        self._tell_exit(slot)
        self._feed(ev.WorkerExited(slot, incarnation, child.exit(), running))

    def _on_readable(self, child: Child) -> None:
        try:
            message = child.channel.receive()
        except EOFError:
            child.ignore_channel()
            return
        if message is None:
            return
        whose = self._whose[child]
        if isinstance(whose, int):
            self._on_router_message(whose, message)
        else:
            self._on_worker_message(*whose, message)

    def _on_router_message(self, epoch: int, m: Message) -> None:
        match m.get("t"):
            case "up":
                self._feed(ev.RouterUp(epoch, m["bind"]))
            case "joined":
                self._feed(ev.WorkerJoined(m["slot"], m["incarnation"]))
            case "idle":
                self._feed(ev.WorkerIdle(m["slot"]))
            case "sick":
                self._feed(ev.WorkerSick(m["slot"], m["incarnation"], m["reason"]))
            case "drained":
                self._feed(ev.RouterDrained())
            case "event":
                self._log.remember(m["level"], m["event"], **{"component": "router", **m["fields"]})
            case "stats":
                self.last_books, self.last_books_at = m, time.monotonic()
                counted = {key: value for key, value in m.items() if key in _COUNTED or key.endswith("_total")}
                self._router_tally.tell(0, epoch, counted)
                self._answered(m)
            case "answer":
                self._answered(m)
            case kind:
                self._log.event.warning("unknown_message", source="router", kind=kind)

    def _answered(self, m: Message) -> None:
        if (asked := self._waiters.get(m["n"])) and not asked[1].done():
            asked[1].set_result(m)

    def _on_worker_message(self, slot: int, incarnation: int, m: Message) -> None:
        match m.get("t"):
            case "loaded":
                self.reports[slot] = {"memory": m.get("memory", {})}  # until its first report
                self._feed(ev.WorkerLoaded(slot, incarnation, {k: v for k, v in m.items() if k != "t"}))
            case "report":
                self.reports[slot] = m
                self._tally(slot, incarnation, m)
            case "recycle":
                self._feed(ev.RecycleAsked(slot, incarnation, str(m.get("reason"))))
            case "answer":
                self._answered(m)
            case "failed":
                self._log.event.error(
                    "worker_cannot_start", worker=slot, incarnation=incarnation, stage=m.get("stage"), error=m.get("message"),
                    traceback=m.get("traceback"),
                )  # fmt: skip
                self._feed(ev.WorkerFailed(slot, incarnation, f"{m.get('stage')}: {m.get('message')}"))
            case kind:
                self._log.event.warning("unknown_message", source="worker", worker=slot, kind=kind)

    def _tally(self, slot: int, incarnation: int, report: Message) -> None:
        counts: dict[str, Any] = {}
        if isinstance(memory := report.get("memory"), dict):
            counts["oom"] = memory.get("failures", 0)
        if isinstance(batching := report.get("batching"), dict):
            counts |= {key: batching[key] for key in ("closed", "sizes", "prediction") if key in batching}
        if "log" in report:
            counts["log"] = report["log"]
        self.tallies.tell(slot, incarnation, counts)

    def _on_line(self, child: Child, source: str, text: str) -> None:
        whose = self._whose.get(child)
        fields: dict[str, Any] = {"component": "probe"}
        if isinstance(whose, tuple):
            fields = {"component": "worker", "worker": whose[0], "incarnation": whose[1]}
        elif whose is not None:
            fields = {"component": "router"}
        if len(text) > _MAX_OUTPUT:  # cut as the log cuts: thousands of these may wait in its queue
            fields["cut_from_bytes"] = len(text)
            text = "…" + text[-_MAX_OUTPUT:]
        self._log.event.info("output", pid=child.pid, source=source, line=text, **fields)
