"""Every accepted request and where it is: waiting in the backlog, waiting among the suspects, or outstanding at one worker.

It is in one place at a time, therefore it never runs twice at once; and it leaves by `finish` alone, therefore it is answered once.
A request answered early (deadline, cancel) leaves its ticket with the worker, whose room it goes on using until the ticket returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpupool.errors import ErrorCode
from gpupool.link import Result
from gpupool.spec import RouterSpec
from gpupool.wire import RequestId

from .accounts import Accounts
from .admission import Bounds
from .backlog import Backlog
from .commands import Command, Event, Export
from .deadlines import Deadlines
from .poison import CONTENT_DEATHS, Poison
from .replies import Replies, client_name, text_of
from .requests import SUSPECT_RETURNS, Request, State
from .retry_budget import RetryBudget
from .suspects import Suspects
from .tracing import Finished, Trace

#: When to come again if no estimate can be made.
RETRY_MS: Final = 200
#: Deaths of workers at one request's hands after which its content is refused.
POISON_DEATHS: Final = 2
#: Returns unbegun, see `requests.SUSPECT_RETURNS`, after which a request is not sent again.
MAX_RETURNS: Final = 2 * SUSPECT_RETURNS
#: Requests that are named in the log when they come back from a worker at once.
_NAMED: Final = 256


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended. `running`: the tickets that it was executing; None when they cannot be told: perhaps all."""

    slot: int
    running: Collection[int] | None
    blame: bool  # whether what it ran may have killed it
    kind: str  # crash, stuck, operator …: one of a few, for the books

    @property
    def unexplained(self) -> bool:
        """Whether it may have come of any request that the worker had: nobody asked for it, and nothing was marked as running."""
        return self.blame and self.running is not None and not self.running


class Ledger:
    """The requests under way, the books about them, and the commands that came of it."""

    def __init__(self, spec: RouterSpec) -> None:
        self._max_attempts = spec.max_attempts
        self._names = [m.name for m in spec.models]
        self._versions = [m.version for m in spec.models]
        self.commands: list[Command] = []
        self.open: dict[bytes, dict[RequestId, Request]] = {}  # by client, those that have any
        self.accounts = Accounts()
        self.backlog = Backlog()
        self.suspects = Suspects()
        self.bounds = Bounds(
            self.backlog,
            max_pending=spec.max_pending,
            max_pending_bytes=spec.max_pending_bytes,
            client_share=spec.max_client_share,
        )
        self.retries = RetryBudget(spec.slots * max(m.batching.max_batch for m in spec.models))
        self.deadlines = Deadlines()
        self.poison = Poison()
        self.replies = Replies(spec.models, spec.slots - spec.overflow)

    def all_open(self) -> list[Request]:
        """Return all requests that are owed an answer."""
        return [request for mine in self.open.values() for request in mine.values()]

    @property
    def pending(self) -> int:
        """Requests that wait in the router."""
        return len(self.backlog) + len(self.suspects)

    def full_for(self, request: Request) -> str | None:
        """Say which bound a newcomer would break."""
        suspects = len(self.suspects)
        return self.bounds.full_for(request.size, suspects) or self.bounds.full_of(request.tenant, request.size, suspects)

    def make_room(self, request: Request, now: float) -> str | None:
        """Say which bound a newcomer would break when nobody has to give way to it.

        In a full queue the tenant that holds most gives up its last place, if that is much more than the newcomer's holds: who floods
        starves nobody but itself (dropping from the longest queue, as in McKenney's fairness queueing, 1990).
        """
        bounds, tenant = self.bounds, request.tenant
        if own := bounds.full_of(tenant, request.size, len(self.suspects)):
            return own
        while full := bounds.full_for(request.size, len(self.suspects)):
            heaviest = bounds.heavier_than(tenant, request.size)
            if heaviest is None or not bounds.can_give(heaviest, tenant, request.size):
                return full
            last = self.backlog.last_of(heaviest)
            self.backlog.remove(last)
            self.accounts.displaced += 1
            text = "the queue is full, and most of it is this client's"
            self.finish(last, ErrorCode.OVERLOADED, now, message=text, retry_after_ms=RETRY_MS)
        return None

    def accept(self, request: Request) -> None:
        """Take a request in."""
        if (mine := self.open.get(request.client)) is None:
            mine = self.open[request.client] = {}
        mine[request.id] = request
        self.deadlines.add(request)
        self.backlog.push(request)
        self.accounts.accepted += 1

    def finish(
        self,
        request: Request,
        code: str,
        now: float,
        *,
        message: str = "",
        result: Result | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        """Answer a request that has been taken out of wherever it was."""
        reply = self.replies.finished(request, code, now, message=message, result=result, retry_after_ms=retry_after_ms)
        if (trace := request.trace) is not None:
            if reply.record:  # else its line is not in the sample
                reply.record["trace_id"] = trace.hex
            if trace.sampled:
                self._export(trace, request, code, now, result)
        if request.state is not State.IN_FLIGHT or result is not None:
            request.frames = ()  # else they may yet turn out to have killed their worker, which holds them too
        request.state = State.DONE
        mine = self.open[request.client]
        del mine[request.id]
        if not mine:
            del self.open[request.client]
        self.deadlines.remove(request)
        self.accounts.answered(self._names[request.model], code)
        self.commands.append(reply)

    def _export(self, trace: Trace, request: Request, code: str, now: float, result: Result | None) -> None:
        sent = request.sent if request.state is State.IN_FLIGHT else 0.0
        done = () if result is None else (result.batch_size, result.preprocess_s, result.forward_s, result.marks)
        self.commands.append(Export(Finished(
            trace, text_of(request.id) or "", self._names[request.model], self._versions[request.model], request.slot, str(code),
            request.attempts, request.rows, request.priority, request.size, request.arrived, sent, now, *done,
        )))  # fmt: skip

    def withdraw(self, request: Request) -> None:
        """Take an open request out of wherever it is; its ticket, if it has one out, stays with the worker."""
        if request.state is State.IN_FLIGHT:
            self.accounts.in_flight -= 1
        elif not self.suspects.remove(request):
            self.backlog.remove(request)

    def take_back(self, requests: Iterable[Request], now: float, reason: str, *, unasked_from: int | None = None) -> None:
        """Let requests wait again that a worker was sent and never started; `unasked_from`: the slot of one that leaves unasked."""
        back: list[Request] = []
        for request in requests:
            alone = self.suspects.returned(request)
            if request.state is State.DONE:
                continue
            self.accounts.in_flight -= 1
            if unasked_from is not None:
                self.returned_unbegun(request, unasked_from, alone=alone)
            if self._ends_workers(request, now):
                continue
            if request.deadline <= now:
                self.finish(request, ErrorCode.DEADLINE_EXCEEDED, now, message="time ran out")
            else:
                back.append(request)
        self._requeue(back, now, reason)

    def returned_unbegun(self, request: Request, slot: int, *, alone: bool = False) -> None:
        """Note that a request came back unbegun from a worker that ended for no known reason; `alone`: it had nothing else.

        Of a death that is marked as another's this says nothing, nor of a planned end. One that was suspected for its returns, and whose
        worker ended again when it had nothing else, is the reason.
        """
        if alone and request.returns >= SUSPECT_RETURNS:
            request.deaths += 1
        request.returns += 1
        request.died_on = slot

    def mourn(self, requests: Iterable[Request], death: Death, now: float) -> int:
        """Decide about the requests that a dead worker had; return how many wait again."""
        back: list[Request] = []
        for request in requests:
            alone = self.suspects.returned(request)
            sole = death.blame and death.running is not None and len(death.running) == 1 and request.ticket in death.running
            deaths = self.poison.death(request.model, request.frames, now) if sole and request.frames else 0
            if deaths >= CONTENT_DEATHS:
                self._poison(request, deaths, now)
            if request.state is State.DONE:
                request.frames = ()
                continue
            self.accounts.in_flight -= 1
            if death.running is None or request.ticket in death.running:
                request.attempts += 1
                if death.blame:
                    request.deaths += 1
                    request.died_on = death.slot
                ran_to_death = death.blame
            else:
                ran_to_death = False
                if death.unexplained:
                    self.returned_unbegun(request, death.slot, alone=alone)
            if not self._ends_with(request, now, again=ran_to_death):
                back.append(request)
        self._requeue(back, now, death.kind)
        return len(back)

    def _ends_with(self, request: Request, now: float, *, again: bool) -> bool:
        """Answer a request that came back from a dead worker and may not be sent again; `again`: it would run a second time."""
        if self._ends_workers(request, now):
            pass
        elif len(self.poison) and self.poison.holds(request.model, request.frames, now):
            self.finish(request, ErrorCode.POISON, now, message="workers die of this content; it is refused for a while")
        elif request.deadline <= now:
            self.finish(request, ErrorCode.DEADLINE_EXCEEDED, now, message="time ran out; its worker died")
        elif not request.retry:
            text = "the worker died; the request may have run, and it is not to run twice"
            self.finish(request, ErrorCode.WORKER_LOST, now, message=text)
        elif request.attempts >= self._max_attempts:
            text = f"the worker died, {request.attempts} of {self._max_attempts} attempts are used"
            self.finish(request, ErrorCode.WORKER_LOST, now, message=text)
        elif again and not self.retries.take(self.accounts.replied["ok"], now):
            self.accounts.unretried += 1
            text = "the worker died, and so many requests were run again of late that no more are"
            self.finish(request, ErrorCode.WORKER_LOST, now, message=text, retry_after_ms=RETRY_MS)
        else:
            return False
        return True

    def _ends_workers(self, request: Request, now: float) -> bool:
        """Answer a request that came back and that workers end of, or seem to."""
        if request.deaths >= POISON_DEATHS:
            self._poison(request, request.deaths, now)
            text = f"{request.deaths} workers died while they ran this request; it is refused for a while"
            self.finish(request, ErrorCode.POISON, now, message=text)
        elif request.returns >= MAX_RETURNS:
            text = f"{request.returns} workers ended before they began this request; it is not sent again"
            self.finish(request, ErrorCode.WORKER_LOST, now, message=text)
        else:
            return False
        return True

    def _poison(self, request: Request, deaths: int, now: float) -> None:
        """Refuse a request's content from now on."""
        name = self.poison.add(request.model, request.frames, now, deaths=deaths)
        fields = {
            "hash": name, "model": self._names[request.model], "input_bytes": request.size, "worker_deaths": deaths,
            **_whose(request), "worker": request.slot, "incarnation": request.incarnation,
        }  # fmt: skip
        self.commands.append(Event("error", "request_poisoned", fields, told=True))

    def _requeue(self, requests: Iterable[Request], now: float, reason: str) -> None:
        """Let requests wait again, before all others; those that workers may die of wait among the suspects.

        What no longer fits the bounds is refused: those whose turn would come last, who would have been refused a moment later.
        """
        fresh: list[Request] = []
        suspects: list[Request] = []
        requests = list(requests)
        self._tell_redispatched(requests, now, reason)
        for request in requests:
            request.state = State.PENDING
            if request.trace is not None and request.trace.sampled:
                request.trace.came_back(request.slot, request.sent, now, reason)
            request.came_back(now)
            (suspects if request.suspected else fresh).append(request)
            self.accounts.redispatch(reason)
        self.backlog.restore(fresh)
        self.suspects.add(suspects)
        for _ in range(len(fresh) + len(suspects)):
            if not self.bounds.overrun(len(self.suspects)):
                return
            last = self.backlog.last_of(self.bounds.heaviest()) if self.backlog else self.suspects.last()
            self.withdraw(last)
            text = "requests came back from a worker and the backlog is full"
            self.finish(last, ErrorCode.OVERLOADED, now, message=text, retry_after_ms=RETRY_MS)

    def _tell_redispatched(self, requests: Sequence[Request], now: float, reason: str) -> None:
        """Say of each request which worker it came back from: of one that took long, this is what its own line cannot tell."""
        for request in requests[:_NAMED]:
            fields = {
                **_whose(request), "ticket": request.ticket, "worker": request.slot, "incarnation": request.incarnation,
                "reason": reason, "attempts": request.attempts, "worker_deaths": request.deaths, "alone": request.suspected,
                "pending_ms": round(1e3 * request.pending(now), 3), "held_ms": round(1e3 * (now - request.sent), 3),
            }  # fmt: skip
            self.commands.append(Event("info", "request_redispatched", fields))
        if (unnamed := len(requests) - _NAMED) > 0:
            self.commands.append(Event("info", "more_requests_redispatched", {"reason": reason, "unnamed": unnamed}))

    def abandon_pending(self, code: ErrorCode, now: float, message: str, retry_after_ms: int | None = None) -> None:
        """Answer all that waits."""
        for request in [*self.suspects, *self.backlog]:
            self.withdraw(request)
            self.finish(request, code, now, message=message, retry_after_ms=retry_after_ms)


def _whose(request: Request) -> dict[str, Any]:
    """Name a request as its own log record does."""
    user = {"user": request.tenant.name} if request.tenant.name else {}
    return {"request_id": text_of(request.id), "client": client_name(request.client), **user}
