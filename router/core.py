"""The router's decisions: what happens to a message between its arrival and its one reply.

Every method is an event (`now` is monotonic seconds) and appends to `commands`; nothing here reads a clock or a socket. Events
change the books; `dispatch`, called once after each drain of the sockets, gives waiting requests to workers, many at a time.

Covers: clients, deadlines, drain and stop. The workers' side stands in `dispatch`, the checks of a message in `intake`.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from gpupool.errors import ErrorCode
from gpupool.link import CANCEL, WorkFlag
from gpupool.spec import RouterSpec, client_specs
from gpupool.wire import Header, WireError, parse_header, split_delimiter

from .balance import Policy
from .commands import Command, Event, Export, Quit, Reply, SendTickets, Tell
from .dispatch import NO_WORKERS_RETRY_MS, Dispatch
from .intake import Intake, Refused
from .ledger import RETRY_MS, Ledger
from .replies import client_name, text_of
from .requests import Request, State
from .tenants import MAX_GARBAGE, Connection, Connections, Tenant
from .tracing import Finished, Sampler

#: A request is refused when the predicted wait exceeds the time it has by this factor: predictions are rough.
CLEARLY: Final = 1.5
#: Bounds of what a client is told to wait before it tries again.
_MIN_RETRY_MS: Final = 20
_MAX_RETRY_MS: Final = 5000
_TRACED: Final = int(WorkFlag.TRACED)


class Mode(StrEnum):
    """Whether new requests are taken."""

    OPEN = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"


class Core:
    """A router: its ledger, its workers, and the events of clients and of the supervisor."""

    def __init__(self, spec: RouterSpec) -> None:
        self.ledger = Ledger(spec)
        self.workers = Dispatch(spec, self.ledger)
        self._intake = Intake(spec)
        self.sampler = Sampler(spec.traces)
        self.mode = Mode.OPEN
        self.target_delay_s = spec.target_delay_ms / 1e3  # 0: no target
        self.connections = Connections(spec.clients)
        self._drained_told = False

    def take_commands(self) -> list[Command]:
        """Return what is to be done, in order, and forget it."""
        commands, self.ledger.commands = self.ledger.commands, []
        return commands

    # Clients

    def message(self, client: bytes, message: Sequence[bytes], now: float) -> None:
        """A message has arrived from a client; `message` is what follows its routing id. Never raises."""
        connection = self.connections.get(client) or self.connections.meet(client)
        delimiter, frames = split_delimiter(message)
        header: Header | None = None
        try:
            if not frames:
                raise WireError("the message has no header frame")
            header = parse_header(frames[0])
            if header.type == "infer":
                self._infer(client, connection.tenant, header, frames[1:], now, delimiter=delimiter)
            elif header.type == "cancel":
                self._cancel(client, header, now)
            else:
                body = self._intake.info() if header.type == "info" else b""
                reply = self.ledger.replies.answered(client, delimiter=delimiter, request_id=header.id, body=body)
                self.ledger.commands.append(Reply(reply, {}))
            connection.garbage = 0
        except WireError as e:
            if e.code is not ErrorCode.BAD_REQUEST or (e.field == "v" and e.request_id is not None):
                connection.garbage = 0  # sense, though not to be had: a newer client's, too
            elif self._is_garbage(client, connection):
                self.ledger.accounts.silenced += 1
                return
            self._refuse(client, e, header, frames, now, delimiter=delimiter)
        except Exception:  # a fault of ours in one message must not cost the others theirs
            self.ledger.commands.append(Event("error", "message_failed", {"traceback": traceback.format_exc()}))
            mine = Refused("the router failed on this message", ErrorCode.INTERNAL, header.id if header else None)
            self._refuse(client, mine, header, frames, now, delimiter=delimiter)

    def _is_garbage(self, client: bytes, connection: Connection) -> bool:
        """Count a malformed message; whether it is one too many in a row, and not to be answered any more."""
        connection.garbage += 1
        if connection.garbage == MAX_GARBAGE + 1:
            fields = {"client": client_name(client), "malformed": connection.garbage}
            self.ledger.commands.append(Event("warning", "client_silenced", fields))
        return connection.garbage > MAX_GARBAGE

    def _infer(
        self, client: bytes, tenant: Tenant, header: Header, frames: Sequence[bytes], now: float, *, delimiter: bool
    ) -> None:
        ledger, workers = self.ledger, self.workers
        request = self._intake.admit(client, tenant, header, frames, now, delimiter=delimiter)
        if (mine := ledger.open.get(client)) and request.id in mine:
            raise Refused("a request with this id is already open", ErrorCode.BAD_REQUEST, request.id, field="id")
        if self.mode is not Mode.OPEN or (workers.fleet.held and workers.fleet.all_held):
            raise Refused("the pool takes no new requests", ErrorCode.DRAINING, request.id)
        if len(ledger.poison) and (name := ledger.poison.holds(request.model, frames, now)):
            text = f"this request has killed workers and is refused for a while (hash {name})"
            raise Refused(text, ErrorCode.POISON, request.id)
        if not workers.fleet.by_slot and workers.hopeless:
            text = "no worker is ready"
            raise Refused(text, ErrorCode.NO_WORKERS, request.id, retry_after_ms=NO_WORKERS_RETRY_MS)
        backlog = ledger.backlog
        if backlog or ledger.suspects:
            if ledger.full_for(request):
                self._make_room(request, now)
            # The cheap comparison first: the prediction itself is for backlogs that may be too long.
            if backlog.rows > workers.forecast.rows_per_s * (request.deadline - now) > 0.0:
                self._foresee(request, now)
            if request.patient and backlog.waited_s(tenant, request.priority, now) > self.target_delay_s > 0.0:
                self._end_standing_queue(request)
        if header.trace is not None or self.sampler.by_chance:
            request.trace = trace = self.sampler.begin(header.trace, now)
            if trace is not None and trace.sampled:
                request.flags |= _TRACED
        ledger.accept(request)

    def _make_room(self, request: Request, now: float) -> None:
        """Send off what came in the same drain, or refuse what a heavier client has waiting; refuse the request if nothing helps."""
        self.workers.dispatch(now)
        if full := self.ledger.make_room(request, now):
            raise self._overloaded(full, request)

    def _foresee(self, request: Request, now: float) -> None:
        """Refuse a request whose deadline cannot be met."""
        wait_s = self.workers.wait_s(request.tenant, request.priority)
        if wait_s > CLEARLY * (request.deadline - now):
            self.workers.overflow.refused_for_time()
            raise self._overloaded(f"the deadline cannot be met: about {wait_s:.1f} s of work are waiting", request)

    def _end_standing_queue(self, request: Request) -> None:
        """Refuse a request that named no deadline while its client's queue stands: a burst is taken, but later ones wait elsewhere.

        As in CoDel (Nichols and Jacobson, 2012) the measure is the time that the head has waited, not the length; unlike there nothing
        that waits is dropped, since each was promised an answer.
        """
        if self.workers.fleet.usable:  # with nobody to work, waiting says nothing about the load
            self.workers.overflow.refused_for_time()
            text = f"requests of this client have waited {self.target_delay_s:g} s; send a timeout to wait longer"
            raise self._overloaded(text, request)

    def _overloaded(self, text: str, request: Request) -> Refused:
        wait_s = self.workers.wait_s(request.tenant, request.priority)
        return Refused(text, ErrorCode.OVERLOADED, request.id, retry_after_ms=_retry_ms(wait_s))

    def _cancel(self, client: bytes, header: Header, now: float) -> None:
        if header.id is None:
            raise WireError("cancel needs the id of the request to cancel", field="id")
        request = self.ledger.open.get(client, {}).get(header.id)
        if request is not None:  # else it is answered already, or was never here
            self._end_early(request, ErrorCode.CANCELLED, now, "cancelled by the client")

    def named(self, client: bytes, name: str) -> None:
        """A client is known by its key: told before its first message is, and again should the key get another name."""
        self.connections.named(client, name)

    def gone(self, client: bytes, now: float) -> None:
        """A client's connection has ended: what it asked for is not run any more, and its replies are for nobody."""
        self.connections.gone(client)
        ledger = self.ledger
        for request in list(ledger.open.get(client, {}).values()):
            self._end_early(request, ErrorCode.CANCELLED, now, "its client's connection ended")
        for command in ledger.commands:  # not sent yet, and the next connection may have the same routing id
            if isinstance(command, Reply) and command.frames and command.frames[0] == client:
                command.frames = []
                self.undelivered()

    def _refuse(
        self, client: bytes, error: WireError, header: Header | None, frames: Sequence[bytes], now: float, *, delimiter: bool
    ) -> None:
        ledger = self.ledger
        model = self._intake.model_name(header) if header is not None and header.type == "infer" else ""
        ledger.accounts.refused(model, error.code)
        connection = self.connections.get(client)
        input_bytes = sum(map(len, frames[1:]))
        reply = ledger.replies.refused(
            client, error.code, error.message, delimiter=delimiter, request_id=error.request_id, field=error.field,
            retry_after_ms=getattr(error, "retry_after_ms", None), input_bytes=input_bytes, user=connection.tenant.name if connection else "",
        )  # fmt: skip
        ledger.commands.append(reply)
        if header is None or header.type != "infer" or (trace := self.sampler.begin(header.trace, now)) is None:
            return
        reply.record["trace_id"] = trace.hex
        if trace.sampled:
            name = text_of(error.request_id) or ""
            finished = Finished(trace, name, model, "", -1, error.code, 0, 0, header.priority, input_bytes, now, 0.0, now)
            ledger.commands.append(Export(finished))

    # Time

    def dispatch(self, now: float) -> None:
        """Send what can be sent, and settle what follows from the events since the last call."""
        self.workers.dispatch(now)
        self.workers.settle(now)
        if self.mode is Mode.DRAINING and not self._drained_told and not self.ledger.open:
            self._drained_told = True
            self.ledger.commands.append(Tell({"t": "drained"}))

    def tick(self, now: float) -> None:
        """Answer the requests whose time is up; to be called at `next_deadline`."""
        for request in self.ledger.deadlines.expired(now):
            self._end_early(request, ErrorCode.DEADLINE_EXCEEDED, now, "time ran out before the reply")

    def next_deadline(self) -> float | None:
        """When `tick` is needed next."""
        return self.ledger.deadlines.next()

    def _end_early(self, request: Request, code: ErrorCode, now: float, message: str) -> None:
        ledger, ticket = self.ledger, None
        if request.state is State.IN_FLIGHT:
            ticket = request.ticket
        ledger.withdraw(request)
        ledger.finish(request, code, now, message=message)
        worker = self.workers.fleet.by_slot.get(request.slot)
        if ticket is not None and worker is not None:
            ledger.commands.append(SendTickets(worker.peer, CANCEL, [ticket]))

    # The supervisor

    def drain(self) -> None:
        """Refuse new requests, finish the rest, then tell `drained`."""
        self.mode = Mode.DRAINING
        self._drained_told = False

    def undrain(self) -> None:
        """Take requests again."""
        self.mode = Mode.OPEN

    def stop(self, now: float) -> None:
        """Answer whatever is left, and quit."""
        self.mode = Mode.STOPPING
        for request in self.ledger.all_open():
            if request.state is State.IN_FLIGHT:
                request.attempts += 1  # it may have begun: whoever must not have it run twice is told so
            self.ledger.withdraw(request)
            self.ledger.finish(request, ErrorCode.DRAINING, now, message="the pool is stopping")
        self.ledger.commands.append(Quit())

    def settings(self, values: dict[str, Any]) -> None:
        """Take over live values; those that are not given stay.

        Raises:
            ValueError: for an unknown policy; nothing is changed then.
        """
        policy = Policy(values.get("policy", self.workers.balance.policy))
        self.workers.balance.policy = policy
        self.ledger.bounds.set(
            max_pending=values.get("max_pending"), max_pending_bytes=values.get("max_pending_bytes"),
            client_share=values.get("max_client_share"),
        )  # fmt: skip
        self.target_delay_s = values.get("target_delay_ms", 1e3 * self.target_delay_s) / 1e3
        self.workers.overflow.target_delay_s = self.target_delay_s
        if (sample := values.get("trace_sample")) is not None:
            self.sampler.set_sample(sample)
        if (clients := values.get("clients")) is not None:
            self.connections.bound(client_specs(clients))
        if timeout_ms := values.get("default_timeout_ms"):
            self._intake.default_timeout_s = timeout_ms / 1e3
        if batching := values.get("batching"):
            self.workers.fleet.set_max_queue(min(model["max_queue"] for model in batching))

    def clear_poison(self, prefix: str) -> int:
        """Let contents pass again whose hash begins so, all with ""; returns how many."""
        return self.ledger.poison.clear(prefix)

    def held_bytes(self) -> int:
        """Return the bytes of bodies that wait or are at workers."""
        return self.ledger.backlog.size_bytes + sum(w.size_bytes for w in self.workers.fleet.by_slot.values())

    def undelivered(self, count: int = 1) -> None:
        """Replies could not be brought to their clients."""
        self.ledger.accounts.undeliverable += count

    def latencies(self) -> dict[str, Any]:
        """Return the histograms of latency by model and stage."""
        return self.ledger.replies.latencies.told(self._intake.names)

    def stats(self, now: float) -> dict[str, Any]:
        """Return the books. They balance: accepted == replied + pending + in flight."""
        ledger, accounts = self.ledger, self.ledger.accounts
        state = "starting" if self.mode is Mode.OPEN and not self.workers.joined_ever else str(self.mode)
        return {
            "state": state, "pending": ledger.pending, "in_flight": accounts.in_flight, "accepted_total": accounts.accepted,
            "replied_total": dict(accounts.replied),
            "replied_by_model": {model: dict(codes) for model, codes in accounts.by_model.items()}, "undeliverable_total": accounts.undeliverable,
            "late_results_total": accounts.late_results, "redispatched_total": dict(accounts.redispatched),
            "silenced_total": accounts.silenced, "displaced_total": accounts.displaced, "unretried_total": accounts.unretried,
            "overflowed_total": self.workers.overflow.sent, "pressure": self.workers.overflow.on(now),
            "retry_budget": round(ledger.retries.left(accounts.replied["ok"], now), 4),
            "poisoned": len(ledger.poison), "poison": ledger.poison.shown(self._intake.names, now),
            "workers": {w.slot: w.rows for w in self.workers.fleet.by_slot.values()},
        }  # fmt: skip


def _retry_ms(wait_s: float) -> int:
    """When a client should come again: when half of what waits is done, if that can be told."""
    return int(min(max(500 * wait_s, _MIN_RETRY_MS), _MAX_RETRY_MS)) if wait_s else RETRY_MS
