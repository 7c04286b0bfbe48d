"""Plays the router's shell and its workers: carries out the core's commands in memory, and checks the books at every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgpack

from gpupool import link, wire
from gpupool.link import Hello, Result
from gpupool.router.commands import Event, Export, Quit, Reply, SendTickets, SendWork, Tell
from gpupool.router.core import Core
from gpupool.router.requests import Request
from gpupool.router.tracing import Finished
from gpupool.spec import BatchingSpec, ModelSpec, RouterSpec

TOKEN = "t"
CLIENT = b"client-1"


def router_spec(**options: Any) -> RouterSpec:
    models = (ModelSpec("echo", batching=BatchingSpec(max_queue=100)), ModelSpec("other", version="7"))
    values: dict[str, Any] = {
        "pool": "p", "epoch": 1, "token": TOKEN, "bind": ("tcp://127.0.0.1:0",), "workers_endpoint": "ipc://w", "slots": 8,
        "models": models,
    }  # fmt: skip
    return RouterSpec(**(values | options))


class RouterWorld:
    """A core with in-memory peers. `now` moves only when told to."""

    def __init__(self, **options: Any) -> None:
        self.core = Core(router_spec(**options))
        self.now = 100.0
        self.replies: dict[tuple[bytes, Any], list[dict[str, Any]]] = defaultdict(list)
        self.frames: list[list[bytes]] = []  # of every reply
        self.records: list[dict[str, Any]] = []
        self.held: dict[bytes, dict[int, Request]] = defaultdict(dict)  # tickets by worker
        self.sent: list[tuple[bytes, list[Request]]] = []  # messages with work, in order
        self.cancels: list[tuple[bytes, int]] = []
        self.welcomed: list[bytes] = []
        self.told: list[dict[str, Any]] = []
        self.events: list[str] = []
        self.log: list[Event] = []  # the same, whole
        self.exported: list[Finished] = []
        self.quit = False
        self.unreachable: set[bytes] = set()

    def step(self) -> None:
        """End a turn: dispatch, and carry out what the core says."""
        self.core.dispatch(self.now)
        while commands := self.core.take_commands():
            for command in commands:
                match command:
                    case Reply(frames, record):
                        self._reply(frames)
                        self.records.append(record)
                    case SendWork(peer, requests):
                        tickets = [r.ticket for r in requests]
                        if peer in self.unreachable:
                            self.core.workers.send_failed(peer, tickets, self.now)
                        else:
                            self.sent.append((peer, requests))
                            self.held[peer] |= dict(zip(tickets, requests, strict=True))
                    case SendTickets(peer, link.CANCEL, tickets):
                        self.cancels += [(peer, ticket) for ticket in tickets]
                    case SendTickets(peer, _, _):
                        self.welcomed.append(peer)
                    case Tell(message):
                        self.told.append(message)
                    case Event(_, name, _):
                        self.events.append(name)
                        self.log.append(command)
                    case Export(finished):
                        self.exported.append(finished)
                    case Quit():
                        self.quit = True
            self.core.dispatch(self.now)
        self.check()

    def check(self) -> None:
        ledger = self.core.ledger
        assert ledger.accounts.balanced(ledger.pending), self.core.stats(0.0)
        assert len(ledger.all_open()) == ledger.pending + ledger.accounts.in_flight
        assert len(ledger.deadlines) == len(ledger.all_open())

    def _reply(self, frames: list[bytes]) -> None:
        client, *rest = frames
        self.frames.append(frames)
        if not rest[0]:
            rest = rest[1:]
        header = wire.parse_reply(rest[0])
        self.replies[client, header.get("id")].append(header)

    # What peers do

    def ask(
        self, request_id: Any = "a", *, client: bytes = CLIENT, body: bytes = b"\x01", step: bool = True, **header: Any
    ) -> None:
        self.message([wire.pack_request({"id": request_id, **header}), body], client=client, step=step)

    def message(self, frames: list[bytes], *, client: bytes = CLIENT, step: bool = True) -> None:
        self.core.message(client, frames, self.now)
        if step:
            self.step()

    def join(self, slot: int = 0, incarnation: int = 1, batch_limit: int = 32, *, proven: bool = True) -> bytes:
        """Register a worker, and return its peer id. A proven one gets no slow start."""
        peer = f"w{slot}.{incarnation}".encode()
        self.core.workers.hello(peer, Hello(slot, incarnation, 1, TOKEN, batch_limit), self.now)
        worker = self.core.workers.fleet.by_slot[slot]
        worker.proven = proven
        self.core.workers.fleet.set_limit(worker, batch_limit)
        self.step()
        return peer

    def answer(self, peer: bytes, tickets: Iterable[int] | None = None, code: str = "ok", **fields: Any) -> None:
        """Return results for these tickets, or for all that the worker has."""
        mine = list(self.held[peer]) if tickets is None else list(tickets)
        results = []
        for ticket in mine:
            request = self.held[peer].pop(ticket)
            results.append(Result(ticket, code, frames=tuple(request.frames) if code == "ok" else (), **fields))
        self.core.workers.results(peer, results, self.now)
        self.step()

    def lose(self, slot: int, incarnation: int = 1, running: Iterable[int] | None = (), *, blame: bool = True) -> None:
        self.core.workers.lost(
            slot, incarnation, None if running is None else set(running), self.now, blame=blame, reason="crash"
        )
        self.held.pop(f"w{slot}.{incarnation}".encode(), None)
        self.step()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.step()

    # What came of it

    def ids(self, peer: bytes) -> list[Any]:
        """Ids of the requests that a worker has, in the order sent."""
        return [r.id for r in self.held[peer].values()]

    def tickets(self, peer: bytes) -> list[int]:
        return list(self.held[peer])

    def codes(self, request_id: Any = "a", client: bytes = CLIENT) -> list[str]:
        return [r["code"] for r in self.replies[client, request_id]]

    def header(self, request_id: Any = "a", client: bytes = CLIENT) -> dict[str, Any]:
        (header,) = self.replies[client, request_id]
        return header

    def told_kinds(self) -> list[str]:
        return [m["t"] for m in self.told]


def many(count: int) -> bytes:
    data: bytes = msgpack.packb(list(range(count)))
    return data
