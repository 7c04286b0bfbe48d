"""What a worker adds to its model: time from a message sent to forward, from forward to the answer, and between two full batches; and what
threads that preprocess bring.

A worker process against a router and a supervisor played here, so that nothing else is measured but the hop over ipc:// in each
direction, which is told apart. The model says when its forward began and ended, on the clock that all processes share.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgpack
import zmq

from gpupool import link
from gpupool.board import ENV_FD as BOARD_FD
from gpupool.board import Board, Word
from gpupool.channel import ENV_FD as CHANNEL_FD
from gpupool.channel import Channel
from gpupool.child import ENV_PARENT
from gpupool.link import Work
from gpupool.samples import unpack_body
from gpupool.spec import BatchingSpec, LogSpec, ModelSpec, WorkerSpec, to_message

_LIMIT: Final = 32
_SILENCE_MS: Final = 60_000


class Peer:
    """A worker that has joined."""

    def __init__(self, socket: zmq.Socket[bytes], peer: bytes) -> None:
        self._socket, self._peer = socket, peer
        self._ticket = 0

    def send(self, count: int) -> None:
        """So many requests in one message."""
        works = []
        for _ in range(count):
            self._ticket += 1
            works.append(Work(self._ticket, 0, link.WorkFlag(0), 1, 30.0, 5, [msgpack.packb({"x": self._ticket})]))
        self._socket.send_multipart([self._peer, *link.pack_work(works)])

    def receive(self) -> list[tuple[float, float, int]]:
        """The stamps of the answers in the next message."""
        if not self._socket.poll(_SILENCE_MS):
            raise SystemExit("the worker is silent")
        _, *frames = self._socket.recv_multipart()
        stamps: list[Any] = [unpack_body(r.frames[0], r.frames[1:]) for r in link.unpack_results(frames)]
        return [(began, ended, rows) for began, ended, rows in stamps]


@contextmanager
def worker(
    options: dict[str, Any], *, handler: str = "Stamped", threads: int = 1, max_batch: int = _LIMIT, cpus: tuple[int, ...] = ()
) -> Iterator[Peer]:
    """Start one with a stamping model."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("wb") as nowhere:
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        endpoint = f"ipc://{folder}/w"
        socket.bind(endpoint)
        board = Board.create(1)
        board.set(Word.ROUTER_EPOCH, 1)
        ours, theirs = Channel.pair()
        model = ModelSpec(
            "m", handler=f"tests.bench.handlers:{handler}", options=options, preprocess_threads=threads,
            batching=BatchingSpec(max_batch=max_batch, min_batch=min(8, max_batch)),
        )  # fmt: skip
        spec = WorkerSpec(
            pool="p", slot=0, incarnation=1, token="t", router_endpoint=endpoint, device="cpu", device_id="cpu:0", models=(model,),
            cpus=cpus, search_path=(str(Path(__file__).parents[2]),), log=LogSpec(level="error"),
        )  # fmt: skip
        env = {
            **os.environ, CHANNEL_FD: str(theirs.fileno()), BOARD_FD: str(board.fd), ENV_PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "gpupool.worker"], env=env, pass_fds=[theirs.fileno(), board.fd], stdin=subprocess.DEVNULL,
            stdout=nowhere,
        )  # fmt: skip
        try:
            theirs.close()
            ours.send(to_message(spec))
            peer, *_ = socket.recv_multipart()
            socket.send_multipart([peer, *link.pack_tickets(link.WELCOME, [1])])
            yield Peer(socket, peer)
        finally:
            process.terminate()
            process.wait(10)
            ours.close()
            socket.close(0)
            context.term()


def hop_us() -> float:
    """Half of a round trip of a small message between two threads' sockets over ipc://."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        code = (
            f"import zmq; s = zmq.Context().socket(zmq.DEALER); s.connect('ipc://{folder}/h'); s.send(b'')\n"
            "while True: s.send(s.recv())"
        )
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"ipc://{folder}/h")
        process = subprocess.Popen([sys.executable, "-c", code])
        peer, _ = socket.recv_multipart()
        times = []
        for _ in range(2000):
            began = time.monotonic()
            socket.send_multipart([peer, b"x" * 60])
            socket.recv_multipart()
            times.append(time.monotonic() - began)
            time.sleep(0.0005)
        process.kill()
        process.wait(10)
        socket.close(0)
        context.term()
    return 1e6 * median(times) / 2


def overhead(seconds: float) -> None:
    """One request at a time."""
    print("## A worker's own time, one request at a time, us\n")
    print(
        "| forward | sent to forward, p50 / p99 | forward to answer, p50 / p99 | hop over ipc:// alone, p50 |\n| --- | ---: | ---: | ---: |"
    )
    for name, handler, options in (
        ("nothing", "Stamped", {"seconds": 0.0}),
        ("nothing, and a preprocess that does nothing", "Prepared", {"seconds": 0.0}),
        ("asleep for 5 ms", "Stamped", {"seconds": 0.005}),
    ):
        with worker(options, handler=handler) as peer:
            before, after = [], []
            until = time.monotonic() + seconds + 0.5
            while (sent := time.monotonic()) < until:
                peer.send(1)
                ((began, ended, _),) = peer.receive()
                after.append(1e6 * (time.monotonic() - ended))
                before.append(1e6 * (began - sent))
                time.sleep(0.001)
        cells = [f"{median(v):.0f} / {sorted(v)[len(v) * 99 // 100]:.0f}" for v in (before[100:], after[100:])]
        print(f"| {name} | {cells[0]} | {cells[1]} | {hop_us():.0f} |", flush=True)
    print()


def gaps(seconds: float) -> None:
    """So many requests open that every batch is full: how long the model waits for the next one."""
    print(f"## Between two full batches of {_LIMIT}, as the model sees it\n")
    print("| forward | full batches | gap ms, p50 / p99 | idle share of the batch time, mean |\n| --- | ---: | ---: | ---: |")
    for name, options in (
        ("asleep for 10 ms", {"seconds": 0.010}),
        ("10 ms of matrix products in torch, one thread", {"seconds": 0.010, "torch": True}),
        ("asleep for 40 ms", {"seconds": 0.040}),
    ):
        with worker(options) as peer:
            peer.send(2 * _LIMIT)
            stamps: dict[float, tuple[float, int]] = {}
            until = time.monotonic() + seconds + 0.5
            while time.monotonic() < until:
                answers = peer.receive()
                peer.send(len(answers))
                for began, ended, rows in answers:
                    stamps[began] = (ended, rows)
        ordered = sorted(stamps.items())[10:]
        pairs = [
            (1000 * (b - a_end), 1000 * (b_end - b))
            for (_, (a_end, n)), (b, (b_end, m)) in pairwise(ordered)
            if n == m == _LIMIT
        ]
        gap = sorted(g for g, _ in pairs)
        share = 100 * sum(gap) / sum(t for _, t in pairs)
        print(
            f"| {name} | {len(pairs)} of {len(ordered) - 1} | {median(gap):.3f} / {gap[len(gap) * 99 // 100]:.3f} | {share:.2f} % |",
            flush=True,
        )
    print()


def threads(seconds: float) -> None:
    """A slow preprocess beside a forward, 32 requests open, batches of 8."""
    print("## preprocess 5 ms, forward 10 ms, both asleep, batches of 8, 32 requests open\n")
    print("| preprocess_threads | samples/s | batch, mean | share of the time in forward |\n| --- | ---: | ---: | ---: |")
    for count in (1, 2, 4, 8):
        options = {"seconds": 0.010, "preprocess": 0.005}
        with worker(options, handler="Prepared", threads=count, max_batch=8) as peer:
            peer.send(32)
            stamps: list[tuple[float, float, int]] = []
            until = time.monotonic() + seconds + 0.5
            while time.monotonic() < until:
                answers = peer.receive()
                peer.send(len(answers))
                stamps += answers
        stamps = stamps[100:]
        batches = {began: (ended, rows) for began, ended, rows in stamps}
        span = max(ended for ended, _ in batches.values()) - min(batches)
        mean = sum(rows for _, rows in batches.values()) / len(batches)
        share = 100 * sum(ended - began for began, (ended, _) in batches.items()) / span
        print(f"| {count} | {len(stamps) / span:,.0f} | {mean:.1f} | {share:.0f} % |", flush=True)
    print()


def worker_cost(seconds: float) -> None:
    """All three."""
    overhead(seconds)
    gaps(seconds)
    threads(seconds)
