"""A pretended worker process in virtual time: a real batcher, and around it what the link, the work loop and the beat would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack

from gpupool.board import Phase
from gpupool.link import BYE, CANCEL, HELLO, RESULTS, WELCOME, Hello, Result, Work, WorkFlag
from gpupool.supervisor.events import WorkerLoaded
from gpupool.worker.batch import Batch, Item
from gpupool.worker.batcher import Batcher
from gpupool.worker.ceiling import Ceilings

from .promises import Ask
from .virtual_board import BoardSlot
from .virtual_time import Actor

if TYPE_CHECKING:
    from .universe import Universe

BEAT_S = 0.2
BATCH_S = 0.01
_HELLO_AGAIN_S = 1.0
_DUMP_S = 0.05


@dataclass(eq=False)
class Job:
    """One dispatch of a request while the worker has it."""

    ask: Ask
    ticket: int
    epoch: int
    missing: int
    transit_s: float  # how long it was on its way: more than a moment when somebody stood still
    begun: bool = False  # some rows have been taken
    started: bool = False  # a batch with some rows has ended
    answered: bool = False
    rows_running: int = 0


class VirtualWorker(Actor):
    """One process. Its public methods are what happens to it."""

    def __init__(self, universe: Universe, slot: int, incarnation: int) -> None:
        super().__init__(f"worker {slot}.{incarnation}")
        self.slot, self.incarnation, self.pid = slot, incarnation, 1000 * slot + incarnation
        self.doomed = False  # dies when its next batch has run, before it can tell
        self.worked_at = universe.time.now  # when what it is at began
        self.in_kernel = False  # no signal reaches it
        self.kill_waits = False
        self.last_words_lost = False  # what it had sent when it died never left
        self.asked: str | None = None  # why the supervisor signalled it last
        self.open = False
        self.stopping = False
        self.peer = b""
        self.jobs: dict[int, Job] = {}
        self.batch: Batch | None = None
        self._u = universe
        self._born = universe.time.now
        self._batch_epoch = 0
        self._epoch = 0
        self._welcomed = False
        self._hello_at = 0.0
        self._results: list[Result] = []
        self._look_at = float("inf")
        policies = [m.batching for m in universe.models]
        self._policies = policies
        self.batcher = Batcher(policies, Ceilings())
        universe.time.after(universe.rng.uniform(0.05, 0.3), self, self._attach)

    @property
    def board(self) -> BoardSlot:
        """Its record."""
        return self._u.board[self.slot]

    # Life

    def _attach(self) -> None:
        u, old = self._u, self.board
        u.board[self.slot] = BoardSlot(
            self.incarnation, self.pid, Phase.IMPORT, self._born, self._born + u.policy.liveness.load_timeout_s,
            set_batch=old.set_batch, set_window=old.set_window,
        )  # fmt: skip
        self._beat()
        u.time.after(u.rng.uniform(0.05, 0.3), self, self._load)

    def _load(self) -> None:
        self.board.phase = Phase.LOAD
        if self.slot not in self._u.loads_hang:
            self._u.time.after(self._u.rng.uniform(0.1, 0.8), self, self._loaded)

    def _loaded(self) -> None:
        if self.slot in self._u.loads_fail:
            self.asked = None
            self.die(code=70)
            return
        self.board.phase, self.board.deadline = Phase.IDLE, 0.0
        self.open = True
        self._refresh()
        supervisor, loaded = self._u.supervisor, WorkerLoaded(self.slot, self.incarnation, {})
        self._u.time.send(self.name, supervisor, lambda: supervisor.feed(loaded))
        self._look_around()

    def _beat(self) -> None:
        self.board.beat = self._u.time.now
        if self.open:
            self._refresh()
            self._look_around()
            self._wake()
        self._u.time.after(BEAT_S, self, self._beat)

    def _refresh(self) -> None:
        board, batcher = self.board, self.batcher
        batcher.batch_share, batcher.window_share = board.set_batch, board.set_window
        board.limit = batcher.lowest_limit()
        cap = min(p.max_batch for p in self._policies)
        assert 0 < board.limit <= cap, f"a limit of {board.limit}, the cap is {cap}"

    def signal(self, name: str, reason: str) -> None:
        """A signal of the supervisor's; SIGCONT goes along with each."""
        self.asked = reason
        if name == "SIGKILL":
            if self.in_kernel:
                self.kill_waits = True
            else:
                self.die(signal=name)
            return
        if self.in_kernel:
            return
        if name == "SIGABRT":
            patience = self._u.policy.liveness
            at_least = patience.batch_timeout_s if self.board.phase == Phase.BATCH else min(patience.load_timeout_s, 2.5)
            worked_s = self._u.time.now - max(self.worked_at, self._u.stood_until)
            assert self.frozen or worked_s >= at_least - 1e-6, f"called hung after {worked_s:.3f} s"
        self._u.time.thaw(self)
        if name == "SIGTERM":
            self._u.time.after(0.0, self, self._stop)
        else:
            self._u.time.after(_DUMP_S, self, lambda: self._dumped(name, reason))

    def die(self, *, signal: str | None = None, code: int | None = None) -> None:
        """The process ends, at whatever it was."""
        if self.alive:
            self.alive = False
            self.last_words_lost = self._u.rng.random() < 0.3
            self._u.worker_died(self, signal, code)

    def _dumped(self, name: str, reason: str) -> None:
        self.asked = reason  # though it may have been told to stop meanwhile
        self.die(signal=name)

    def _crash(self) -> None:
        self.asked = None
        self.die(signal="SIGSEGV")

    def _leave(self) -> None:
        """End in order: what there is to say is said."""
        self._send_results()
        self.alive = False
        self._u.worker_died(self, None, 0)

    def _stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        if not self.open:
            self._leave()
            return
        tickets = {item.ticket for item in self.batcher.untouched()}
        for ticket in tickets:
            del self.jobs[ticket]
        self._say(BYE, sorted(tickets))
        self._wake()

    # The link

    def _look_around(self) -> None:
        u = self._u
        if not self.stopping and u.router_epoch != self._epoch:
            self._epoch = u.router_epoch
            self._welcomed, self._hello_at = False, u.time.now
            self.peer = f"{self.slot}.{self.incarnation}.{self._epoch}".encode()
            self.batcher.clear()
            self._results.clear()
            for ticket, job in list(self.jobs.items()):
                if not job.rows_running:
                    self._forget(ticket, whole=False)
        if self._epoch and not self._welcomed and u.time.now >= self._hello_at:
            self._hello_at = u.time.now + _HELLO_AGAIN_S
            self._say(HELLO, Hello(self.slot, self.incarnation, self._epoch, u.token, self.batcher.lowest_limit()))

    def hear(self, kind: bytes, epoch: int, payload: list[Work] | list[int], sent_at: float) -> None:
        """A message of a router's arrives."""
        if epoch != self._epoch:
            return  # it came on a socket that is closed by now
        for each in payload:
            if isinstance(each, Work):
                self._work(each, self._u.time.now - sent_at)
            elif kind == WELCOME:
                self._welcomed = True
            elif kind == CANCEL:
                self._cancel(each)
        self._send_results()
        self._wake()

    def _work(self, work: Work, transit_s: float) -> None:
        u = self._u
        if self.stopping:
            self._say(BYE, [work.ticket])
            return
        ask = u.witness.asks[msgpack.unpackb(work.frames[0])[0]]
        if work.timeout_s <= 0:
            self._results.append(Result(work.ticket, "deadline_exceeded", started=False))
            return
        self.jobs[work.ticket] = job = Job(ask, work.ticket, self._epoch, work.rows, transit_s)
        alone = bool(work.flags & WorkFlag.ALONE)
        deadline = u.time.now + work.timeout_s
        self.batcher.add(Item(work.ticket, (work.model, 0), deadline, work.rows, work.priority, alone, job), u.time.now)

    def _cancel(self, ticket: int) -> None:
        if self.batcher.cancel(ticket):
            self._answer(self.jobs[ticket], "cancelled")

    def _answer(self, job: Job, code: str) -> None:
        batch_s = BATCH_S if job.started else 0.0
        self._results.append(
            Result(job.ticket, code, started=job.started, batch_size=job.ask.rows, forward_s=batch_s, frames=(b"",))
        )
        job.answered = True
        if not job.rows_running:
            self._forget(job.ticket, whole=code == "ok")

    def _forget(self, ticket: int, *, whole: bool) -> None:
        job = self.jobs.pop(ticket)
        self._u.witness.ended(job.ask, self.slot, self.incarnation, whole=whole)

    def _send_results(self) -> None:
        if self._results:
            results, self._results = self._results, []
            self._say(RESULTS, results)

    def _say(self, kind: bytes, payload: Hello | list[int] | list[Result]) -> None:
        self._u.worker_says(self, kind, payload)

    # The work loop

    def _wake(self) -> None:
        """Look into the batcher once all that has come by now is in it."""
        self._u.time.after(0.0, self, self._work_loop)

    def _work_loop(self) -> None:
        u, batcher = self._u, self.batcher
        if self.batch is not None or not self.open:
            return
        for item in batcher.expire(u.time.now):
            job: Job = item.owner
            if not job.answered:
                self._answer(job, "deadline_exceeded")
        self._send_results()
        batcher.batch_share, batcher.window_share = self.board.set_batch, self.board.set_window
        batch = batcher.take(u.time.now)
        if batch is not None:
            self._run(batch)
        elif self.stopping and not batcher.rows:
            self._leave()
        elif (due := batcher.next_deadline()) is not None and not u.time.now < self._look_at <= due:
            self._look_at = due
            u.time.after(max(0.0, due - u.time.now), self, self._work_loop)

    def _run(self, batch: Batch) -> None:
        u, board, now = self._u, self.board, self._u.time.now
        limit = max(1, int(self._policies[batch.key[0]].max_batch * board.set_batch + 1e-6))
        jobs: list[Job] = [share.item.owner for share in batch.shares]
        assert 0 < batch.rows <= limit, f"a batch of {batch.rows}, the limit is {limit}"
        assert {j.ask.model for j in jobs} == {batch.key[0]}, "a batch of several models"
        assert len(jobs) == 1 or not any(s.item.alone for s in batch.shares), "a suspect in company"
        assert all(s.item.deadline > now for s in batch.shares), "work begun past its deadline"
        self.batch, self._batch_epoch = batch, self._epoch
        board.tickets, board.rows_running, board.rows_queued = batch.tickets, batch.rows, self.batcher.rows
        self.worked_at = now
        board.phase, board.since, board.deadline = Phase.BATCH, now, now + u.policy.liveness.batch_timeout_s
        for job, share in zip(jobs, batch.shares, strict=True):
            first, job.begun = not job.begun, True
            job.rows_running = share.stop - share.start
            u.witness.begun(job.ask, self.slot, self.incarnation, now, first=first, transit_s=job.transit_s)
        kinds = {job.ask.kind for job in jobs}
        seconds = BATCH_S * u.rng.uniform(0.5, 2.0) * (40 if "slow" in kinds else 1)
        if "poison" in kinds and not u.healed:
            u.time.after(seconds * u.rng.random(), self, self._crash)
        elif "hang" not in kinds or u.healed:
            u.time.after(seconds, self, lambda: self._ran(batch, seconds))

    def _ran(self, batch: Batch, seconds: float) -> None:
        u, board = self._u, self.board
        for share in batch.shares:
            job: Job = share.item.owner
            job.rows_running = 0
            job.started = True
            job.missing -= share.stop - share.start
            if job.answered or job.epoch != self._epoch:
                self._forget(job.ticket, whole=False)
            elif job.ask.kind in ("bad", "broken"):
                self.batcher.cancel(job.ticket)
                self._answer(job, "model_error" if job.ask.kind == "bad" else "internal")
            elif not job.missing:
                self._answer(job, "ok")
        board.batches += 1
        board.service_s = seconds / batch.rows
        if self.doomed:
            self._idle()
            self.asked = None
            self.die(signal="SIGSEGV")
            return
        # The link's thread sends the results while the work loop clears the board: either may come first.
        if u.rng.random() < 0.5:
            self._send_results()
            u.time.after(u.rng.uniform(0.0, 0.0005), self, self._idle)
        else:
            self._idle()
            u.time.after(u.rng.uniform(0.0, 0.0005), self, self._send_results)
        self.batcher.ran(batch, seconds, self._u.time.now)

    def _idle(self) -> None:
        board, self.batch = self.board, None
        board.phase, board.deadline, board.tickets = Phase.IDLE, 0.0, []
        board.rows_running, board.rows_queued = 0, self.batcher.rows
        self._wake()
