"""A real router process with a supervisor's end of its line, and peers that speak the protocols by hand."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import zmq

from gpupool import link, wire
from gpupool.board import ENV_FD as BOARD_FD
from gpupool.board import Board
from gpupool.channel import ENV_FD as CHANNEL_FD
from gpupool.channel import Channel
from gpupool.child import ENV_PARENT
from gpupool.spec import BatchingSpec, LogSpec, ModelSpec, RouterSpec, to_message
from gpupool.supervisor.listeners import Listeners

TOKEN = "secret of this run"
Ctx = zmq.Context[zmq.Socket[bytes]]


class FakeWorker:
    """A worker's end of the link. It answers only when told to."""

    def __init__(self, sock: zmq.Socket[bytes], slot: int = 0, incarnation: int = 1, batch_limit: int = 32) -> None:
        self.sock = sock
        self.hello = link.Hello(slot, incarnation, 1, TOKEN, batch_limit)
        self.got: list[link.Work] = []
        self.cancelled: list[int] = []
        self.welcomed = False

    def say_hello(self) -> None:
        self.sock.send_multipart(link.pack_hello(self.hello))

    def receive(self, timeout_s: float = 5.0) -> bytes:
        assert self.sock.poll(int(timeout_s * 1000)), "nothing came from the router"
        frames = self.sock.recv_multipart()
        if frames[0] == link.WORK:
            self.got += link.unpack_work(frames)
        elif frames[0] == link.CANCEL:
            self.cancelled += link.unpack_tickets(frames)
        elif frames[0] == link.WELCOME:
            self.welcomed = True
        return frames[0]

    def work(self, count: int = 1, timeout_s: float = 5.0) -> list[link.Work]:
        """Receive until so much work is there, and take it."""
        end = time.monotonic() + timeout_s
        while len(self.got) < count:
            self.receive(max(0.0, end - time.monotonic()))
        taken, self.got = self.got, []
        return taken

    def silent(self, timeout_s: float = 0.1) -> bool:
        return not self.got and not self.sock.poll(int(timeout_s * 1000))

    def answer(self, *results: link.Result) -> None:
        self.sock.send_multipart(link.pack_results(results))

    def echo(self, work: list[link.Work]) -> None:
        self.answer(*(link.Result(w.ticket, "ok", batch_size=len(work), frames=w.frames) for w in work))


class RouterProcess:
    """A router process and the supervisor's view of it."""

    def __init__(self, folder: Path, log_file: Path, **options: Any) -> None:
        models = (ModelSpec("echo", batching=BatchingSpec()), ModelSpec("other", version="7"))
        values: dict[str, Any] = {
            "pool": "test", "epoch": 1, "token": TOKEN, "bind": ("tcp://127.0.0.1:0",),
            "workers_endpoint": f"ipc://{folder}/workers.sock", "slots": 4, "models": models, "log": LogSpec(file=str(log_file)),
        }  # fmt: skip
        values |= options
        self.listeners = Listeners(values["bind"], Path(values["workers_endpoint"].removeprefix("ipc://")))
        values["bind"] = tuple(each.address for each in self.listeners.clients)
        values["bind_fds"] = tuple(each.fileno() for each in self.listeners.clients)
        values["workers_fd"] = self.listeners.workers.fileno()
        self.spec = RouterSpec(**values)
        self.log = log_file
        self.context: Ctx = zmq.Context(1)
        self.board = Board.create(4)
        self.channel, theirs = Channel.pair()
        env = os.environ | {
            CHANNEL_FD: str(theirs.fileno()), BOARD_FD: str(self.board.fd), ENV_PARENT: str(os.getpid()),
        }  # fmt: skip
        fds = (theirs.fileno(), self.board.fd, *self.spec.bind_fds, self.spec.workers_fd)
        self.process = subprocess.Popen([sys.executable, "-m", "gpupool.router"], env=env, pass_fds=fds)
        theirs.close()
        assert self.channel.send(to_message(self.spec))
        self.bind: list[str] = []
        self._count = 0
        self._sockets: list[zmq.Socket[bytes]] = []
        self._kept: list[dict[str, Any]] = []

    def wait_up(self) -> None:
        self.bind = self.expect("up")["bind"]

    def expect(self, kind: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """Wait for a message of this kind; others are kept for later."""
        end = time.monotonic() + timeout_s
        while True:
            for i, message in enumerate(self._kept):
                if message["t"] == kind:
                    return self._kept.pop(i)
            left = end - time.monotonic()
            assert left > 0, f"no {kind} from the router"
            if select.select([self.channel], [], [], left)[0] and (new := self.channel.receive()):
                self._kept.append(new)

    def tell(self, kind: str, /, **fields: Any) -> None:
        assert self.channel.send({"t": kind, **fields})

    def stats(self) -> dict[str, Any]:
        self._count += 1
        self.tell("stats", n=self._count)
        stats = self.expect("stats")
        assert stats["n"] == self._count
        replied = sum(stats["replied_total"].values())
        assert stats["accepted_total"] == replied + stats["pending"] + stats["in_flight"], stats
        return stats

    def worker(self, slot: int = 0, incarnation: int = 1, batch_limit: int = 32) -> FakeWorker:
        """Make a worker that is registered."""
        sock = self.socket()
        sock.connect(self.spec.workers_endpoint)
        worker = FakeWorker(sock, slot, incarnation, batch_limit)
        worker.say_hello()
        assert worker.receive() == link.WELCOME
        assert self.expect("joined") == {"t": "joined", "slot": slot, "incarnation": incarnation}
        return worker

    def socket(self, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        """Make a socket that is closed with the router."""
        sock = self.context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        self._sockets.append(sock)
        return sock

    def client(self, kind: int = zmq.DEALER, identity: bytes | None = None) -> zmq.Socket[bytes]:
        sock = self.socket(kind)
        if identity is not None:
            sock.setsockopt(zmq.IDENTITY, identity)
        sock.connect(self.bind[0])
        return sock

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.listeners.close()
        self.channel.close()
        self.board.close()
        for sock in self._sockets:
            sock.close()
        self.context.term()


def ask(sock: zmq.Socket[bytes], body: bytes = b"\x01", *buffers: bytes, **header: Any) -> None:
    """Send a request as a DEALER client."""
    sock.send_multipart([wire.pack_request(header), body, *buffers])


def reply(sock: zmq.Socket[bytes], timeout_s: float = 5.0) -> tuple[dict[str, Any], list[bytes]]:
    """Receive one reply: header, and body with buffers."""
    assert sock.poll(int(timeout_s * 1000)), "no reply"
    header, *frames = sock.recv_multipart()
    return wire.parse_reply(header), frames


def packed(value: object) -> bytes:
    data: bytes = msgpack.packb(value)
    return data
