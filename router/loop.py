"""The router's shell: drains its two sockets, lets the core decide, carries out what it says.

One turn drains both sockets within bounds, then dispatches what came, so that many requests travel in one message. Plain sockets
watched by descriptor cost a third of what zmq.asyncio does per request. Whatever ends a turn early comes up for another one through
the loop's queue, so that neither socket, nor the supervisor's line, waits for the other two.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop
import zmq

from gpupool import link
from gpupool.board import Board, Phase, SlotWord, Word, unpack_queue
from gpupool.channel import Channel
from gpupool.exits import Exit
from gpupool.keys import KeyFileError
from gpupool.logs import LEVELS, Log
from gpupool.spec import RouterSpec

from .balance import Reading
from .commands import Command, Event, Export, Quit, Reply, SendTickets, SendWork, Tell
from .core import Core
from .door import Door
from .hoards import Hoards
from .keyring import Keys
from .outbox import Outbox, Sent
from .sockets import drain, open_clients, open_workers, readable, send
from .span_export import NO_SPANS, SpanExport
from .supervisor_line import SupervisorLine
from .tracing import Finished

#: Bounds of what one turn takes in: some milliseconds of work.
_TURN_MESSAGES: Final = 256
_TURN_BYTES: Final = 16 << 20
#: How old a reading of the board may be when work is given out.
_READING_S: Final = 0.002
_BEAT_S: Final = 0.2
_BEATS_PER_LEVEL: Final = 5
_BEATS_PER_COUNT: Final = 25
#: Share of the limit of descriptors from which on we warn.
_MANY_DESCRIPTORS: Final = 0.9
_OUTBOX_S: Final = 0.002
#: What a dead worker sent last may still be on its way through libzmq when we hear of its death.
_LAST_WORDS_S: Final = 0.003
_LINGER_MS: Final = 1000
_TELL_EVERY_S: Final = 1.0


class Router:
    """The running router."""

    def __init__(self, spec: RouterSpec, board: Board, channel: Channel, log: Log) -> None:
        self._spec = spec
        self._board = board
        self._supervisor = SupervisorLine(channel)
        self._log = log
        self._core = Core(spec)
        self._outbox = Outbox()
        self._span_export = SpanExport(spec.traces, spec.pool, log) if spec.traces.endpoint else None
        self._finished: list[Finished] = []  # traced requests that were answered in this turn
        self._loop = uvloop.new_event_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self._door: Door
        self._hoards: Hoards
        self._clients: zmq.Socket[bytes]
        self._workers: zmq.Socket[bytes]
        self._bound = list(spec.bind)
        self._ended: set[bytes] = set()  # clients whose connection ended since commands were taken
        self._turn_asked = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._read_at = 0.0
        self._beats = 0
        self._bad_messages = 0
        self._bad_told_at = 0.0
        self._request_sample = spec.log.request_sample
        self._sample()

    def run(self) -> int:
        """Take over the listeners, serve until the supervisor says stop, and return the exit code."""
        try:
            self._door = Door(self._context, self._spec.curve, self._log, gone=self._on_gone, named=self._core.named)
        except KeyFileError as e:
            self._log.event.error("keys_unusable", error=str(e))
            self._context.destroy(linger=0)
            return Exit.BAD_CONFIG
        self._clients = open_clients(self._context, self._spec, self._door.attach)
        self._workers = open_workers(self._context, self._spec)
        self._hoards = Hoards(self._door.peers, 2 * self._spec.max_message_bytes, self._log, self._held_bytes)
        loop = self._loop
        loop.set_exception_handler(self._on_exception)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGTERM, self._on_message, {"t": "stop"})
        zap, monitor = self._door.fds
        for fd in (self._clients.get(zmq.FD), self._workers.get(zmq.FD), zap):
            loop.add_reader(fd, self._turn)
        loop.add_reader(monitor, self._on_monitor)
        self._door.watch_keys(lambda rekey, keys: loop.call_soon_threadsafe(self._on_keys, rekey, keys))
        loop.add_reader(self._supervisor.fileno(), self._on_channel)
        self._beat()
        self._supervisor.tell({"t": "up", "bind": self._bound})
        self._log.event.info("router_up", bind=self._bound, epoch=self._spec.epoch)
        self._on_monitor()  # a first look arms the descriptor
        self._turn()
        loop.run_forever()
        self._close()
        return Exit.OK

    # One turn

    def _turn(self) -> None:
        self._turn_asked = False
        now = time.monotonic()
        core = self._core
        more = True
        try:
            more = drain(self._workers, self._on_worker, now, max_messages=_TURN_MESSAGES, max_bytes=_TURN_BYTES)
            if (due := core.next_deadline()) is not None and due <= now:
                core.tick(now)
            more |= self._drain_clients(now, _TURN_MESSAGES, _TURN_BYTES)
            more |= self._door.answer(now, lambda: self._drain_clients(now, _TURN_MESSAGES // 4, _TURN_BYTES // 4))
            if core.ledger.pending and now >= self._read_at + _READING_S:
                self._read_at = now
                core.workers.observe(self._readings(), now)
            self._act(now)
            self._arm(now)
        finally:
            if more or readable(self._clients) or readable(self._workers):
                self._ask_turn()

    def _drain_clients(self, now: float, max_messages: int, max_bytes: int) -> bool:
        door = self._door
        return drain(
            self._clients, self._core.message, now, max_messages=max_messages, max_bytes=max_bytes, known=door.peers.known, meet=door.meet
        )  # fmt: skip

    def _act(self, now: float) -> None:
        """Dispatch, and carry out commands until no more come of it (a send that fails brings new ones)."""
        core = self._core
        core.dispatch(now)
        while commands := core.take_commands():
            self._ended.clear()
            for command in commands:
                try:
                    if type(command) is Reply:  # nearly all are: spared the search
                        self._reply(command, now)
                    else:
                        self._carry_out(command, now)
                except Exception as e:  # one reply that cannot be sent must not cost the others theirs
                    core.undelivered(isinstance(command, Reply))
                    self._log.event.error("command_failed", command=type(command).__name__, exc_info=e)
            core.dispatch(now)
        if self._finished and self._span_export is not None:
            # All of a turn together: what one message of a worker brought stays together, and so a batch's requests do.
            self._span_export.put(self._finished)
            self._finished = []

    def _carry_out(self, command: Command, now: float) -> None:
        match command:
            case SendWork(peer, requests):
                if send(self._workers, [peer, *link.pack_work(requests)]) is not Sent.OK:
                    self._core.workers.send_failed(peer, [r.ticket for r in requests], now)
            case SendTickets(peer, kind, tickets):
                send(self._workers, [peer, *link.pack_tickets(kind, tickets)])  # who misses it is lost, and is told so
            case Tell(message):
                self._supervisor.tell(message)
            case Event(level, name, fields):
                getattr(self._log.event, level)(name, **fields)
                if command.told:
                    self._supervisor.tell({"t": "event", "level": level, "event": name, "fields": fields})
            case Reply():
                self._reply(command, now)
            case Export(finished):
                self._finished.append(finished)
            case Quit():
                self._loop.stop()

    def _reply(self, reply: Reply, now: float) -> None:
        frames = reply.frames
        if not frames:  # its client is gone, and that is counted
            sent = Sent.OK
        elif frames[0] in self._ended:  # since the command was made: the next one may have the same routing id
            sent = Sent.GONE
        else:
            sent = Sent.BUSY if frames[0] in self._outbox else self._send(frames)
        if sent is Sent.BUSY:
            if not self._outbox:
                self._loop.call_later(_OUTBOX_S, self._flush)
            if not self._outbox.add(frames, now):
                self._core.undelivered()
        elif sent is Sent.GONE:
            self._core.undelivered()
        if reply.record:
            self._log.request(reply.record)

    def _send(self, frames: Sequence[bytes]) -> Sent:
        client = frames[0]
        if not client[0]:  # libzmq's own routing ids are never used twice
            return send(self._clients, frames)
        return send(self._clients, frames, lambda: self._door.is_open(client))

    def _flush(self) -> None:
        try:
            self._core.undelivered(self._outbox.flush(self._send, time.monotonic()))
        finally:  # whatever happened, those who still wait are offered theirs again
            if self._outbox:
                self._loop.call_later(_OUTBOX_S, self._flush)
            self._ask_turn()

    def _ask_turn(self) -> None:
        if not self._turn_asked:
            self._turn_asked = True
            self._loop.call_soon(self._turn)

    def _arm(self, now: float) -> None:
        at = self._core.next_deadline()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - now) + 0.001, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._turn()

    def _readings(self) -> list[Reading]:
        get = self._board.get_slot
        readings = []
        now_ns = time.monotonic_ns()
        for slot in self._core.workers.fleet.by_slot:
            rows = sum(unpack_queue(get(slot, SlotWord.QUEUE)))
            limit, service_s = get(slot, SlotWord.BATCH_LIMIT), get(slot, SlotWord.SERVICE_NS) / 1e9
            since_ns = get(slot, SlotWord.PHASE_SINCE_NS) if get(slot, SlotWord.PHASE) == Phase.BATCH else now_ns
            running_s = (now_ns - since_ns) / 1e9
            full_row_s = get(slot, SlotWord.FULL_ROW_NS) / 1e9
            readings.append(Reading(slot, get(slot, SlotWord.INCARNATION), rows, limit, service_s, running_s, full_row_s))
        return readings

    # What comes in

    def _on_worker(self, peer: bytes, frames: list[bytes], now: float) -> None:
        workers = self._core.workers
        try:
            match frames[0] if len(frames) > 1 else b"":
                case link.RESULTS:
                    workers.results(peer, link.unpack_results(frames), now)
                case link.HELLO:
                    workers.hello(peer, link.unpack_hello(frames), now)
                case link.BYE:
                    workers.bye(peer, link.unpack_tickets(frames), now)
                case _:
                    raise link.LinkError("unknown kind of message")
        except Exception as e:  # a stranger on the socket, or a worker's bug: told, and no more
            self._bad_messages += 1
            if now >= self._bad_told_at + _TELL_EVERY_S:
                self._bad_told_at = now
                self._log.event.warning("bad_worker_message", error=f"{type(e).__name__}: {e}", total=self._bad_messages)

    def _on_monitor(self) -> None:
        if self._door.watch():
            self._loop.call_soon(self._on_monitor)  # its descriptor tells once only
        self._ask_turn()

    def _on_gone(self, client: bytes) -> None:
        self._ended.add(client)
        self._core.gone(client, time.monotonic())
        self._core.undelivered(self._outbox.drop(client))

    def _on_keys(self, rekey: Callable[[Keys], object], keys: Keys) -> None:
        rekey(keys)
        self._ask_turn()

    def _on_channel(self) -> None:
        try:
            for message in self._supervisor.hear():
                try:
                    self._on_message(message)
                except Exception as e:  # a message we cannot follow must not end the service
                    self._log.event.error("bad_supervisor_message", message=message.get("t"), exc_info=e)
        except EOFError:
            os._exit(Exit.PARENT_GONE)
        self._ask_turn()

    def _on_message(self, m: dict[str, Any]) -> None:
        core, workers, now = self._core, self._core.workers, time.monotonic()
        match m.get("t"):
            case "lost":
                self._loop.call_later(_LAST_WORDS_S, self._on_lost, m)
            case "hold":
                workers.hold(m["slot"])
            case "release":
                workers.release(m["slot"])
            case "expect":
                workers.expect(m["ready"], m["coming"], m.get("admission", 1.0))
            case "avoid":
                workers.avoid(m["slot"], on=m["on"])
            case "pressure":
                workers.overflow.memory = m["memory"]
            case "settings":
                core.settings(m)
                if "log_level" in m:
                    self._log.set_level(LEVELS[m["log_level"]])
                self._request_sample = m.get("request_sample", self._request_sample)
                self._sample()
            case "drain":
                core.drain()
            case "undrain":
                core.undrain()
            case "stats":
                self._supervisor.tell(
                    {
                        "t": "stats",
                        "n": m["n"],
                        "bind": self._bound,
                        **core.stats(now),
                        **self._door.stats(now),
                        "endless_total": self._hoards.total,
                        "latencies": core.latencies(),
                        "log": self._log.report(),
                        "traces": {**(self._span_export.stats() if self._span_export else NO_SPANS), **core.sampler.stats()},
                    }
                )
            case "clear_poison":
                cleared = core.clear_poison(m["prefix"])
                self._log.event.info("poison_cleared", prefix=m["prefix"], cleared=cleared)
                self._supervisor.tell({"t": "answer", "n": m["n"], "cleared": cleared})
            case "stop":
                core.stop(now)
                self._ask_turn()
            case kind:
                self._log.event.warning("unknown_message", source="supervisor", kind=kind)

    def _on_lost(self, m: dict[str, Any]) -> None:
        now = time.monotonic()
        drain(self._workers, self._on_worker, now, max_messages=4 * _TURN_MESSAGES, max_bytes=4 * _TURN_BYTES)
        running = m.get("running")
        self._core.workers.lost(
            m["slot"], m["incarnation"], None if running is None else set(running), now, blame=bool(m.get("blame")),
            reason=str(m.get("reason", "")), kind=str(m.get("kind", "crash")),
        )  # fmt: skip
        self._ask_turn()

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._log.event.error("router_fault", message=context.get("message"), exc_info=context.get("exception"))

    # Life

    def _held_bytes(self) -> int:
        return self._core.held_bytes() + self._outbox.size_bytes

    def _beat(self) -> None:
        self._loop.call_later(_BEAT_S, self._beat)
        self._board.set(Word.ROUTER_BEAT_NS, time.monotonic_ns())
        self._beats += 1
        self._hoards.look()
        if self._core.workers.overflow.configured:
            self._ask_turn()  # pressure is a matter of time, too
        if self._beats % _BEATS_PER_LEVEL == 0:
            level = self._board.log_level()
            if level != self._log.level and level in LEVELS.values():
                self._log.set_level(level)
                self._sample()
        self._supervisor.flush()
        if self._beats % _BEATS_PER_COUNT == 0:
            self._count_descriptors()
            self._door.look_around(time.monotonic())

    def _sample(self) -> None:
        """Have records of `ok` requests made in the share that the log takes: none where the level lets none pass."""
        self._core.ledger.replies.sample(self._request_sample if self._log.level <= LEVELS["info"] else 0.0)

    def _count_descriptors(self) -> None:
        """Warn before new clients find no descriptor left: libzmq then leaves them waiting without a word."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            used = sum(1 for _ in Path("/proc/self/fd").iterdir())
        except OSError:  # not even one left to count with
            used = limit
        if used > _MANY_DESCRIPTORS * limit:
            self._log.event.warning("descriptors_short", used=used, limit=limit)

    def _close(self) -> None:
        """Answer what has come in the meantime, flush for a bounded time, and close."""
        now = time.monotonic()
        self._drain_clients(now, 4 * _TURN_MESSAGES, 4 * _TURN_BYTES)
        self._act(now)
        self._core.undelivered(self._outbox.flush(self._send, now))
        self._log.event.info("router_stopped", unsent=len(self._outbox), **self._core.stats(now))
        self._door.close(self._clients)
        self._clients.close(_LINGER_MS)
        self._workers.close(0)
        self._context.term()
        if self._span_export is not None:
            self._span_export.close()
