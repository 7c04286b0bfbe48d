"""What the router's decisions cost without any socket: microseconds a request by number of workers, of clients, and of requests that wait.

One turn takes some messages in, dispatches, gives the workers' answers back and dispatches again, as the loop does. Requests beyond what
the workers hold wait throughout; the number of them stays.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Final

import msgpack

from gpupool.link import Hello, Result
from gpupool.router.commands import Reply, SendWork
from gpupool.router.core import Core
from gpupool.router.latencies import Latencies
from gpupool.spec import BatchingSpec, ModelSpec, RouterSpec, TraceSpec

WORKERS: Final = (1, 4, 16, 64)
CLIENTS: Final = (1, 100, 1000)
PENDING: Final = (0, 1000, 10_000)
#: Messages of one turn.
_TURN: Final = 32
_BATCH: Final = 8
_TOKEN: Final = "t"


class Bench:
    """A core with so many workers, clients, and waiting requests. Time goes on by a millisecond a turn."""

    def __init__(self, workers: int, clients: int, pending: int, traces: TraceSpec | None = None) -> None:
        spec = RouterSpec(
            pool="p", epoch=1, token=_TOKEN, bind=("tcp://127.0.0.1:0",), workers_endpoint="ipc://w", slots=workers,
            models=(ModelSpec("echo", batching=BatchingSpec(max_batch=_BATCH)),), max_pending=2 * max(PENDING), default_timeout_ms=3_600_000,
            traces=traces or TraceSpec(),
        )  # fmt: skip
        self.core = Core(spec)
        self.now = 1000.0
        self.clients = [b"client%d" % number for number in range(clients)]
        self.outstanding: deque[tuple[bytes, int]] = deque()
        self.replies = self.sent = 0
        self.body = msgpack.packb({"x": bytes(100)})
        for slot in range(workers):
            self.core.workers.hello(b"worker%d" % slot, Hello(slot, 1, 1, _TOKEN, _BATCH), self.now)
        while self.core.ledger.pending < max(pending, 1):  # the first ones fill the workers
            self.take_in(1)
        if not pending:
            self.answer(len(self.outstanding))
        self.turns(20)
        self.open = len(self.core.ledger.all_open())

    def take_in(self, count: int) -> None:
        """So many requests arrive, each from the next client."""
        for _ in range(count):
            self.sent += 1
            header = msgpack.packb({"v": 1, "id": str(self.sent)})
            self.core.message(self.clients[self.sent % len(self.clients)], [header, self.body], self.now)
        self.settle()

    def answer(self, count: int) -> None:
        """The oldest so many requests are answered, those of one worker in one message; few workers are given the rest in between."""
        while count and self.outstanding:
            by_worker: dict[bytes, list[Result]] = {}
            for _ in range(min(count, len(self.outstanding))):
                peer, ticket = self.outstanding.popleft()
                result = Result(ticket, "ok", batch_size=_BATCH, forward_s=0.001, frames=(self.body,))
                by_worker.setdefault(peer, []).append(result)
                count -= 1
            for peer, results in by_worker.items():
                self.core.workers.results(peer, results, self.now)
            self.settle()

    def settle(self) -> None:
        """Dispatch, and take what the loop would carry out."""
        self.core.dispatch(self.now)
        for command in self.core.take_commands():
            if type(command) is Reply:
                self.replies += 1
            elif type(command) is SendWork:
                self.outstanding.extend((command.peer, request.ticket) for request in command.requests)

    def turns(self, count: int) -> float:
        """Microseconds a request over so many turns."""
        began = time.perf_counter()
        for _ in range(count):
            self.now += 0.001
            self.take_in(_TURN)
            self.answer(_TURN)
        return 1e6 * (time.perf_counter() - began) / (count * _TURN)


def core_cost(*, quick: bool) -> None:
    """Measure all shapes; each as the median of a few runs."""
    turns, runs = (30, 3) if quick else (200, 5)
    print(f"## The router's core alone, us a request ({_TURN} messages a turn, header decoded and reply encoded)\n")
    print(
        f"| workers | waiting | {' | '.join(f'{clients:,} clients' for clients in CLIENTS)} |\n| ---: | ---: |{' ---: |' * len(CLIENTS)}"
    )
    for workers in WORKERS:
        for pending in PENDING:
            cells = []
            for clients in CLIENTS:
                bench = Bench(workers, clients, pending)
                cells.append(median(bench.turns(turns) for _ in range(runs)))
                stats = bench.core.stats(0.0)
                assert stats["accepted_total"] == bench.replies + stats["pending"] + stats["in_flight"]
                assert set(stats["replied_total"]) == {"ok"}, stats["replied_total"]
            print(f"| {workers} | {pending:,} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)
    print(f"\nOf these the six histograms of latency: {_noting(10_000 if quick else 100_000):.2f} us a request.\n")


def _noting(count: int) -> float:
    """Microseconds that counting one request's times takes."""
    latencies, times = Latencies(1), [(us, 3 * us, (us, 1, 2 * us, 1)) for us in (10, 900, 5000, 70_000, 2_000_000)]
    runs = []
    for _ in range(5):
        began = time.perf_counter()
        for pending, total, beside in times * (count // len(times)):
            latencies.note(0, pending, total, beside)
        runs.append(1e6 * (time.perf_counter() - began) / count)
    return median(runs)
