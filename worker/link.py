"""The link thread: all that this process hears and says. Router socket, supervisor channel, stop signals.

It runs from the first moment on, so that a stop is obeyed while a model loads. It registers with the router once the models are ready, and
anew, on a new socket, whenever another router becomes the present one: then all that waited from the old one is dropped and results for it
are thrown away, because nobody is left who knows its tickets; the new router is told of them, to count what ran in vain.

It also decodes and encodes, in slices, beside the inference thread; whatever touches a request other than its samples happens here, but for
preprocessing, which has its own threads.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Final

import zmq

from gpupool.board import Board, Word
from gpupool.channel import Channel
from gpupool.errors import ErrorCode
from gpupool.exits import Exit
from gpupool.link import (
    BYE,
    CANCEL,
    WELCOME,
    WORK,
    Hello,
    LinkError,
    Result,
    pack_hello,
    pack_tickets,
    unpack_tickets,
    unpack_work,
)
from gpupool.logs import Log
from gpupool.spec import MemorySpec, WorkerSpec, batching_spec

from .backlog import Backlog
from .dealer import Dealer
from .faults import Failure, FaultKind, StickyFault
from .intake import Intake
from .record import Record
from .replies import Done, Replies, end, packed

#: How long to wait for WELCOME before saying HELLO again.
#: How long after its connection broke a worker waits for a new router to be the reason.
CUT_S: Final = 2.0
HELLO_AGAIN_S: Final = 1.0
#: What leaving may cost: results that the router does not fetch by then are lost with the process, and run elsewhere.
LINGER_MS: Final = 1000
#: os.eventfd_write lets go of the interpreter, and the link, waiting for just that, takes it: the work loop then waited for results to be
#: encoded before its next forward (between two full batches 239 us in the median, 814 in every tenth case; like this 12 and 21).
_eventfd_write: Final = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT})


class Link:
    """The worker's end of the wire.

    Args:
        leave: ends the process with a code, after flushing what can be flushed.
        memory_settings: puts settings of [memory] into force that a reload has changed.
        snapshot: begins a memory snapshot and returns at once.
        profile: does the same with a profile.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        board: Board,
        channel: Channel,
        record: Record,
        backlog: Backlog,
        log: Log,
        leave: Callable[[int], None],
        memory_settings: Callable[[MemorySpec], None],
        snapshot: Callable[[int, str, float], None],
        profile: Callable[[int, str, int, float], None],
    ) -> None:
        self._spec = spec
        self._board = board
        self._channel = channel
        self._record = record
        self._log = log
        self._leave = leave
        self._memory_settings = memory_settings
        self._snapshot = snapshot
        self._profile = profile
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        signals, self.signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._signals = signals
        self._poller = zmq.Poller()
        self._dealer = Dealer(spec.router_endpoint, self._poller)
        for fd in (self._wake_fd, signals, channel.fileno()):
            self._poller.register(fd, zmq.POLLIN)
        self._backlog = backlog
        backlog.tell_expired = self.wake
        self._intake: Intake
        self._replies: Replies
        self._done: deque[Done] = deque()
        self._results: list[Result] = []
        self._late: list[Result] = []  # of the routers before: told to the present one for its count, without their frames
        self._epoch = 0
        self._welcomed = False
        self._hello_at = 0.0
        self._cut_at: float | None = None  # the connection broke, and no new router explains it yet
        self._open = False
        self._stopping = False
        self._finished = False
        self.busy_since = 0.0
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Listen to the supervisor and to signals."""
        self._thread.start()

    def open(self, intake: Intake, replies: Replies) -> None:
        """Register with the router: the models are ready."""
        self._intake, self._replies = intake, replies
        self._open = True
        self.wake()

    def deliver(self, done: Done) -> None:
        """Hand over a batch that ran (from the work loop)."""
        self._done.append(done)
        self.wake()

    def finish(self, timeout_s: float) -> None:
        """Send what is left, for a bounded time, and end the thread."""
        self._finished = True
        self.wake()
        self._thread.join(timeout_s)

    def wake(self) -> None:
        """Make the thread look around (from any thread)."""
        _eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while not self._finished:
                self._turn()
            self._close()
        except StickyFault as e:
            self._record.error(FaultKind.STICKY)
            self._log.event.error("device_poisoned", detail=str(e))
            self._dealer.close(linger_ms=LINGER_MS)
            self._leave(Exit.REPLACE_ME)
        except BaseException as e:  # a worker that is deaf must not go on as if it heard
            self._log.event.error("link_failed", exc_info=e)
            self._leave(Exit.FAILED)

    def _turn(self) -> None:
        """Wait for something, then do a slice of everything."""
        self.busy_since = 0.0
        ready = dict(self._poller.poll(self._patience_ms()))
        self.busy_since = time.monotonic()
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._signals in ready:
            self._heed(os.read(self._signals, 64))
        if self._channel.fileno() in ready:
            self._hear()
        if not self._open:
            return
        if not self._stopping and self._board.get(Word.ROUTER_EPOCH) != self._epoch:
            self._register()
        if self._dealer.socket in ready:
            self._dealer.flush()
            self._receive()
        self._look_for_cut(ready)
        if self._epoch and not self._welcomed and self.busy_since >= self._hello_at:
            self._say_hello()
        if self._intake.look_at() <= self.busy_since:
            items, results = self._intake.advance()
            self._results += results
            self._backlog.add(items, undecoded=self._intake.rows)
        self._answer()

    def _patience_ms(self) -> int | None:
        """How long the next wait may be."""
        if not self._open:
            return None
        instants = [] if self._welcomed else [self._hello_at]
        if (look_at := self._intake.look_at()) != math.inf:
            instants.append(look_at)
        if self._cut_at is not None:
            instants.append(self._cut_at + CUT_S)
        if (expiry := self._backlog.next_expiry()) is not None:
            instants.append(expiry)
        if not instants:
            return None
        return max(0, min(int((min(instants) - time.monotonic()) * 1000) + 1, 60_000))

    def _heed(self, signals: bytes) -> None:
        if not _STOP_SIGNALS.isdisjoint(signals):
            self._stop("signal")

    def _hear(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                if message.get("t") == "stop":
                    self._stop("supervisor")
                elif message.get("t") == "settings":
                    if "memory" in message:  # first: ceilings are part of the limits shown
                        self._memory_settings(MemorySpec(**message["memory"]))
                    self._backlog.configure([batching_spec(values) for values in message["batching"]])
                elif message.get("t") == "snapshot":
                    self._snapshot(message["n"], message["path"], message["seconds"])
                elif message.get("t") == "profile":
                    self._profile(message["n"], message["path"], message["batches"], message["seconds"])
                elif message.get("t") == "drill" and message.get("kind") == "hang":
                    self._log.event.warning("drilled", kind="hang")
                    self._backlog.drill(self._spec.batch_timeout_s)
        except EOFError:
            os._exit(Exit.PARENT_GONE)

    def _stop(self, by: str) -> None:
        """Give back what was not begun; the work loop finishes the rest and calls `finish`."""
        if self._stopping:
            return
        self._stopping = True
        self._log.event.info("stopping", by=by)
        if not self._open:
            self._leave(Exit.OK)
            return
        tickets = self._intake.untouched()
        tickets += {item.ticket for item in self._backlog.close(undecoded=self._intake.rows)}
        self._dealer.send(pack_tickets(BYE, tickets))

    def _register(self) -> None:
        """Turn to the present router, forgetting the one before."""
        if self._epoch:
            self._log.event.info("router_changed", epoch=self._board.get(Word.ROUTER_EPOCH))
        self._epoch = self._board.get(Word.ROUTER_EPOCH)
        self._welcomed = False
        self._record.registered(0)
        self._intake.clear()
        self._backlog.clear()
        self._results.clear()
        self._dealer.connect()
        self._cut_at = None
        self._hello_at = time.monotonic()

    def _look_for_cut(self, ready: Container[object]) -> None:
        """End this process when its connection has broken and the router lives on.

        That is no accident of the router's, which would be another one by now. What was on its way either way is lost, and libzmq's
        own connection after it is a stranger to the router; it comes of memory that ran out in libzmq's thread, mostly.
        """
        if self._dealer.was_cut(ready) and self._cut_at is None:
            self._cut_at = self.busy_since
        if self._cut_at is None or self.busy_since < self._cut_at + CUT_S or self._stopping:
            return
        if self._board.get(Word.ROUTER_BEAT_NS) / 1e9 > self._cut_at + CUT_S / 2:
            self._log.event.error("link_cut", epoch=self._epoch)
            self._leave(Exit.REPLACE_ME)
        self._cut_at = self.busy_since  # it is dead, or stands still: look again

    def _say_hello(self) -> None:
        spec = self._spec
        hello = pack_hello(
            Hello(spec.slot, spec.incarnation, self._epoch, spec.token, self._backlog.lowest_limit, self._intake.threads)
        )
        self._hello_at = time.monotonic() + HELLO_AGAIN_S
        if not self._dealer.stuck:  # the first one still waits for a router to connect to
            self._dealer.send(hello)

    def _receive(self) -> None:
        for frames in self._dealer.receive():
            try:
                self._take(frames)
            except LinkError as e:
                self._log.event.error("link_message_refused", detail=str(e))

    def _take(self, frames: list[bytes]) -> None:
        kind = frames[0]
        if len(frames) < 2:
            raise LinkError("a message of one frame")
        if kind == WORK:
            works = unpack_work(frames)
            if self._stopping:
                self._dealer.send(pack_tickets(BYE, [w.ticket for w in works]))
                return
            self._results += self._intake.put(works, self._epoch, time.monotonic(), queued=self._backlog.rows)
        elif kind == CANCEL:
            for ticket in unpack_tickets(frames):
                self._cancel(ticket)
        elif kind == WELCOME:
            if unpack_tickets(frames) == [self._epoch]:
                self._welcomed = True
                self._record.registered(self._epoch)
                self._log.event.info("registered", epoch=self._epoch)
        else:
            raise LinkError(f"unknown kind {kind[:8]!r}")

    def _cancel(self, ticket: int) -> None:
        """Answer a cancelled request if any of it still waits. One that runs whole is answered with what comes of it."""
        if not self._intake.cancel(ticket) and (items := self._backlog.cancel(ticket)):
            self._results.append(end(items[0].owner.request, Failure(ErrorCode.CANCELLED, "cancelled")))

    def _answer(self) -> None:
        """Turn what has run and what has expired into one message."""
        for item in self._backlog.expire():
            request = item.owner.request
            if not request.answered:
                self._backlog.cancel(request.ticket)
                self._results.append(
                    end(request, Failure(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the work began"))
                )
        while self._done:
            done = self._done.popleft()
            if done.batch.shares[0].item.owner.request.epoch != self._epoch:
                self._late += [Result(ticket, ErrorCode.CANCELLED) for ticket in dict.fromkeys(done.batch.tickets)]
                continue
            results = self._replies.of(done)
            for item, _, _ in done.batch.shares:  # a `many` request that failed in one row needs its other rows no more
                if item.owner.request.failure is not None:
                    self._backlog.cancel(item.ticket)
            self._results += results
        if self._late and self._welcomed:  # not before: nothing may hold up HELLO
            self._results += self._late
            self._late.clear()
        if self._results:
            results, self._results = self._results, []
            self._dealer.send(packed(results, self._unfit))

    def _unfit(self, result: Result, error: Exception) -> None:
        self._log.event.error("result_unsendable", ticket=result.ticket, error=type(error).__name__)

    def _close(self) -> None:
        """Last words: what has run by now, and BYE for work that crossed ours."""
        if self._open:
            self._receive()
            self._answer()
        self._dealer.close(linger_ms=LINGER_MS)
