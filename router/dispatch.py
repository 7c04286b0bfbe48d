"""The workers' side of the router's decisions: who is there, who gets what, and what becomes of work that comes back.

Work is bound to a worker as late as possible: each holds about what runs plus one batch, the rest waits in the router, where
priorities, deadlines and a worker's death act on all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

from gpupool.errors import ErrorCode
from gpupool.link import WELCOME, Hello, Result, WorkFlag
from gpupool.spec import RouterSpec

from .balance import Balance, Policy, Reading, apply_readings
from .commands import Event, SendTickets, SendWork, Tell
from .forecast import Forecast
from .ledger import Death, Ledger
from .overflow import Overflow
from .replies import RETRYABLE, client_name
from .requests import Request, State
from .tenants import Tenant
from .workers import Fleet, Worker

#: Places at workers for each tenant that waits, from which on one that has none is let past those that have several.
FLOOD: Final = 4
#: Tenants that are looked at, in turn, for one that may pass: what each has next may be too large, or it has something at a worker already.
_LOOKED_AT: Final = 16
#: Infrastructure errors in a row after which a worker is reported for replacement.
MAX_FAILURES: Final = 5
NO_WORKERS_RETRY_MS: Final = 1000
#: Clients that are named, with how many requests each, of those that a dead worker had.
_CLIENTS_TOLD: Final = 5
_URGENT: Final = int(WorkFlag.URGENT)
#: A router's tickets start at its epoch times this, so that none is ever used by two routers of a pool.
_TICKETS_PER_EPOCH: Final = 1 << 40
_MAX_EPOCHS: Final = 1 << 23


class Dispatch:
    """The workers and the work between them and the ledger."""

    def __init__(self, spec: RouterSpec, ledger: Ledger) -> None:
        self._spec = spec
        self._ledger = ledger
        self._ticket = spec.epoch % _MAX_EPOCHS * _TICKETS_PER_EPOCH
        # What workers hold is in memory here too, until it is answered: as many bytes again as may wait, or a message each.
        room_bytes = max(spec.max_pending_bytes // spec.slots, spec.max_message_bytes)
        self.fleet = Fleet(min(m.batching.max_queue for m in spec.models), room_bytes)
        self.balance = Balance(Policy(spec.policy))
        # A pool's second router knows that there were workers, and that they will come to it.
        self.joined_ever = spec.epoch > 1
        self._ready, self._coming = 0, int(self.joined_ever)
        self._no_room = False  # the last round left requests waiting, and nothing has changed since
        self.forecast = Forecast()
        self.overflow = Overflow(spec, ledger, self.fleet, self.forecast)

    # Events of workers

    def hello(self, peer: bytes, hello: Hello, now: float) -> None:
        """A worker has loaded and asks for work."""
        fleet = self.fleet
        wrong = None
        if hello.token != self._spec.token:
            wrong = "wrong token"
        elif hello.epoch != self._spec.epoch:
            wrong = "meant for another router"
        elif not 0 <= hello.slot < self._spec.slots:
            wrong = "no such slot"
        elif fleet.is_lost(hello.slot, hello.incarnation):
            wrong = "this incarnation is dead"
        elif (there := fleet.by_slot.get(hello.slot)) is not None and there.incarnation > hello.incarnation:
            wrong = "a newer incarnation is here"  # its own message came first: those of two senders have no order
        if wrong:
            self._event("warning", "hello_refused", worker=hello.slot, incarnation=hello.incarnation, reason=wrong)
            return
        there = fleet.by_slot.get(hello.slot)
        if there is not None and there.incarnation == hello.incarnation:  # another connection: it still has its work
            fleet.move(there, peer)
            there.leaving = False
        else:
            if there is not None:  # the supervisor lets a slot's next process start only when the last one is dead
                self.lost(there.slot, there.incarnation, None, now, blame=False, reason="replaced")
            newcomer = Worker(peer, hello, overflow=hello.slot >= self._spec.slots - self._spec.overflow)
            newcomer.answered_at = now
            fleet.add(newcomer)
            self._event("info", "worker_joined", worker=hello.slot, incarnation=hello.incarnation)
        fleet.changed()
        self.joined_ever = True
        self._no_room = False
        self._ledger.commands.append(SendTickets(peer, WELCOME, [self._spec.epoch]))
        self._tell("joined", slot=hello.slot, incarnation=hello.incarnation)

    def results(self, peer: bytes, results: Sequence[Result], now: float) -> None:
        """A worker has answered."""
        ledger, worker = self._ledger, self.fleet.by_peer.get(peer)
        accounts = ledger.accounts
        self._no_room = False
        for result in results:
            request = worker.take_back(result.ticket) if worker is not None else None
            if request is None or worker is None:
                accounts.late_results += 1
                continue
            if request is ledger.suspects.running:
                ledger.suspects.returned(request)
            if result.started:
                request.attempts += 1
            if request.state is State.DONE:
                accounts.late_results += result.started
                continue
            accounts.in_flight -= 1
            code, message = result.code, result.message
            if code == "ok" and ledger.poison.suspects:
                ledger.poison.survived(request.model, request.frames, now)
            if code not in RETRYABLE:
                code, message = ErrorCode.INTERNAL, "the worker answered with a code unknown to the router"
            try:
                ledger.finish(request, code, now, message=message, result=result)
            except Exception as e:  # a field that cannot be a reply's: the client is owed one all the same
                code, message = ErrorCode.INTERNAL, f"the worker's answer cannot be passed on: {type(e).__name__}"
                ledger.finish(request, code, now, message=message)
            if code == "ok":
                worker.failures = 0
            elif code == ErrorCode.INTERNAL:
                self._failed(worker)
        if worker is not None and results:
            worker.answered_at = now
            self._learn(worker, results[-1])

    def bye(self, peer: bytes, tickets: Collection[int], now: float) -> None:
        """A worker leaves; it never started these, and answers what it has started."""
        if (worker := self.fleet.by_peer.get(peer)) is not None:
            self._event("info", "worker_leaving", worker=worker.slot, incarnation=worker.incarnation, returned=len(tickets))
            self._give_up(worker, tickets, now, "bye")

    def send_failed(self, peer: bytes, tickets: Collection[int], now: float) -> None:
        """A message with these could not be sent: its worker does not read, or is gone; `lost` will tell."""
        if (worker := self.fleet.by_peer.get(peer)) is not None:
            self._event("warning", "worker_unreachable", worker=worker.slot, incarnation=worker.incarnation)
            self._give_up(worker, tickets, now, "send_failed")

    # Events of the supervisor

    def lost(
        self,
        slot: int,
        incarnation: int,
        running: Collection[int] | None,
        now: float,
        *,
        blame: bool,
        reason: str,
        kind: str = "crash",
    ) -> None:
        """A worker is dead. `running`: the tickets that it was executing; None when they cannot be told: perhaps all.

        `reason` is for people; `kind` (crash, stuck, operator …) is one of a few and counts.
        """
        ledger = self._ledger
        worker = self.fleet.lose(slot, incarnation)
        if worker is None:
            return
        death = Death(slot, running, blame, kind)
        if death.unexplained:  # it only looked as if it had been asked to leave
            for returned_before in worker.returned:
                ledger.returned_unbegun(returned_before, slot)
        if ledger.suspects.reserved is worker:
            ledger.suspects.reserved = None
        outstanding = [request for ticket in list(worker.outstanding) if (request := worker.take_back(ticket)) is not None]
        clients = Counter(request.tenant.name or client_name(request.client) for request in outstanding)
        returned = ledger.mourn(outstanding, death, now)
        self._no_room = False
        fields = {
            "worker": slot, "incarnation": incarnation, "reason": reason, "blame": blame, "outstanding": len(outstanding),
            "returned": returned, "clients": dict(clients.most_common(_CLIENTS_TOLD)),
        }  # fmt: skip
        ledger.commands.append(Event("warning" if blame else "info", "worker_lost", fields, told=True))

    def hold(self, slot: int) -> None:
        """Give a slot no new work."""
        self.fleet.held.add(slot)
        self.fleet.changed()
        self._no_room = False
        if (worker := self.fleet.by_slot.get(slot)) is not None:
            worker.idle_told = False
        else:
            self._tell("idle", slot=slot)
        self._event("info", "worker_held", worker=slot)

    def release(self, slot: int) -> None:
        """Give a slot work again."""
        self.fleet.held.discard(slot)
        self.fleet.changed()
        self._no_room = False
        self._event("info", "worker_released", worker=slot)

    def avoid(self, slot: int, *, on: bool) -> None:
        """Prefer the others to a slot's worker, or no longer: its beat is missing, which may mean much or nothing."""
        (self.fleet.avoided.add if on else self.fleet.avoided.discard)(slot)
        self.fleet.changed()
        self._no_room = False

    def expect(self, ready: int, coming: int, admission: float = 1.0) -> None:
        """How many workers are ready by now, how many may yet become so, and what share of the backlog's bounds is in force."""
        self._ready, self._coming = ready, coming
        self._ledger.bounds.set(share=admission)

    def observe(self, readings: Sequence[Reading], now: float) -> None:
        """Take over what the board says; worth doing every few milliseconds under load."""
        apply_readings(self.fleet, readings, now)
        self.forecast.update(self.fleet.usable)
        self._no_room = False

    # Questions

    @property
    def hopeless(self) -> bool:
        """Whether nobody is there to run anything, and waiting would be in vain."""
        return not self.fleet.registered and not self._ready and (not self.joined_ever or not self._coming)

    def wait_s(self, tenant: Tenant, priority: int) -> float:
        """How long a newcomer of this tenant and priority would wait at the least; 0 when unknown."""
        return self.forecast.wait_s(self._ledger.backlog, self.fleet.usable, tenant, priority)

    # Sending

    def dispatch(self, now: float) -> None:
        """Give what waits to workers with room, all for one worker in one message."""
        ledger, backlog = self._ledger, self._ledger.backlog
        if ledger.suspects or ledger.suspects.reserved:
            self._dispatch_suspect(now)
        if not backlog or (self._no_room and not backlog.news):
            return
        balance, reserved = self.balance, ledger.suspects.reserved
        candidates = [w for w in self.fleet.usable if w is not reserved] if reserved else self.fleet.usable
        parcels: dict[bytes, list[Request]] = {}
        if not self._no_room:
            balance.begin(candidates)
        while backlog:
            worker = None if self._no_room else balance.best()
            if worker is not None:
                request = backlog.pop(now)
                request.flags &= ~_URGENT
            else:
                self._no_room = True
                passing = self._past_what_waits(candidates)
                if passing is None:
                    backlog.news = False
                    break
                worker, request = passing
                backlog.take(request, now)
                request.flags |= _URGENT
            if request.deadline <= now or (backlog and request.deadline < now + worker.needs_s):
                # With others waiting nobody shall run what is answered before it can be done.
                ledger.finish(
                    request, ErrorCode.DEADLINE_EXCEEDED, now, message="too little time was left when a worker was free"
                )
                continue
            self._send(request, worker, now)
            if not self._no_room:
                balance.given(worker)
            if (parcel := parcels.get(worker.peer)) is None:
                parcels[worker.peer] = [request]
            else:
                parcel.append(request)
        ledger.commands += [SendWork(peer, requests) for peer, requests in parcels.items()]

    def _past_what_waits(self, workers: Sequence[Worker]) -> tuple[Worker, Request] | None:
        """Find a worker, all being full, and the request that it takes before what waits there.

        That is for a tenant with nothing at any worker, while what they hold would give each that waits several places: fair turns here
        would else still cost it the batch that a flood has waiting at the worker, or all of a request of a thousand samples. A
        tenant that has something there passes only what is less important.
        """
        backlog = self._ledger.backlog
        places = sum(max(w.room, w.rows) for w in workers)
        if backlog.tenant_count * FLOOD > places:
            return None
        passable = [w for w in workers if w.may_let_past]
        for request in backlog.heads(_LOOKED_AT) if passable else ():
            stays = request.tenant.outstanding > 0
            worker = self.balance.choose(
                w for w in passable if not (stays and not w.is_below(request.priority)) and w.lets_past(request)
            )
            if worker is not None:
                return worker, request
        return None

    def settle(self, now: float) -> None:
        """Let overflow workers have what is theirs, answer what nobody will ever run, and report held workers that have finished."""
        ledger, fleet = self._ledger, self.fleet
        for spare, request in self.overflow.take(now):
            self._send(request, spare, now)
            ledger.commands.append(SendWork(spare.peer, [request]))
        if ledger.pending and self.hopeless:
            text = "no worker is ready, and none is coming"
            ledger.abandon_pending(ErrorCode.NO_WORKERS, now, text, NO_WORKERS_RETRY_MS)
        if fleet.held:
            finishing = ledger.pending and fleet.all_held and fleet.usable
            for slot in fleet.held:
                worker = fleet.by_slot.get(slot)
                if worker is not None and not worker.idle_told and not worker.outstanding and not finishing:
                    worker.idle_told = True
                    self._tell("idle", slot=slot)

    def _dispatch_suspect(self, now: float) -> None:
        suspects, ledger = self._ledger.suspects, self._ledger
        before = suspects.reserved
        suspects.reserve(self.fleet.usable)
        while (request := suspects.take()) is not None:
            worker = suspects.reserved
            if request.deadline > now and worker is not None:
                request.flags |= WorkFlag.ALONE
                self._send(request, worker, now)
                ledger.commands.append(SendWork(worker.peer, [request]))
                break
            suspects.running = None
            ledger.finish(request, ErrorCode.DEADLINE_EXCEEDED, now, message="time ran out before any worker was free")
            suspects.reserve(self.fleet.usable)
        if suspects.reserved is not before:
            self._no_room = False

    def _send(self, request: Request, worker: Worker, now: float) -> None:
        self._ticket += 1
        request.ticket = self._ticket
        request.state = State.IN_FLIGHT
        request.slot = worker.slot
        request.incarnation = worker.incarnation
        request.sent = now
        request.sends += 1
        request.timeout_s = request.deadline - now
        worker.give(request)
        worker.idle_told = False
        self._ledger.accounts.in_flight += 1

    # What workers show of themselves

    def _give_up(self, worker: Worker, tickets: Collection[int], now: float, reason: str) -> None:
        """Send a worker nothing more, and take back what it never started."""
        worker.leaving = True
        self.fleet.changed()
        self._no_room = False
        returned = [request for ticket in tickets if (request := worker.take_back(ticket)) is not None]
        # One that is held or avoided has mostly been asked; `lost` tells.
        unasked = reason == "bye" and worker.slot not in self.fleet.held | self.fleet.avoided
        if not unasked:
            worker.returned += [request for request in returned if request.state is not State.DONE]
        self._ledger.take_back(returned, now, reason, unasked_from=worker.slot if unasked else None)

    def _failed(self, worker: Worker) -> None:
        worker.failures += 1
        if worker.failures >= MAX_FAILURES and not worker.sick:
            worker.sick = True
            self.fleet.changed()
            reason = f"{worker.failures} internal errors in a row"
            self._tell("sick", slot=worker.slot, incarnation=worker.incarnation, reason=reason)
            self._event("error", "worker_sick", worker=worker.slot, incarnation=worker.incarnation, reason=reason)

    def _learn(self, worker: Worker, result: Result) -> None:
        """Learn from a batch, of which any one result tells."""
        if not worker.proven:
            worker.proven = True
            self.fleet.set_limit(worker, worker.batch_limit)
        self.forecast.learn(worker, result)

    def _tell(self, kind: str, **fields: object) -> None:
        self._ledger.commands.append(Tell({"t": kind, **fields}))

    def _event(self, level: str, name: str, **fields: object) -> None:
        self._ledger.commands.append(Event(level, name, fields))
