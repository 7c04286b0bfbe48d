"""A real pool for a test: its own folder, ports and processes, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgpack
import zmq

HERE = Path(__file__).parent
GPUPOOL = [sys.executable, "-P", "-m", "gpupool"]

#: Times small enough to wait for in a test.
FAST = """
[supervision]
heartbeat_interval_s = 0.1
heartbeat_timeout_s = 1.0
batch_timeout_s = 3.0
load_timeout_s = 30.0
stop_timeout_s = 2.0
restart_delays_s = [0.0, 0.5, 1.0]
stable_after_s = 5.0
"""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class RunningPool:
    """A pool of CPU workers with one of the toy models, or `module:Class` of this folder."""

    def __init__(
        self,
        folder: Path,
        model: str = "Echo",
        *,
        workers: int = 2,
        options: str = "",
        config: str = "",
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.port, self.http = free_port(), free_port()
        self.toy_log = folder / "toy.log"
        self.file = folder / "pool.toml"
        self.runtime = folder / "run"
        self.head = f"""
[pool]
runtime_dir = "{self.runtime}"
devices = "cpu:{workers}"
[http]
bind = "127.0.0.1:{self.http}"
[[model]]
name = "toy"
handler = "{model if ":" in model else f"toy_models:{model}"}"
options = {{ {options} }}
"""
        router = f'bind = ["tcp://127.0.0.1:{self.port}"]'
        self.write(
            config.replace("[router]", f"[router]\n{router}") if "[router]" in config else f"{config}\n[router]\n{router}\n"
        )
        self.env = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "TOY_LOG": str(self.toy_log), **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.stderr: int | None = None  # a descriptor for it, instead of a file

    def write(self, config: str) -> None:
        """Write the configuration file."""
        self.file.write_text(self.head + config)

    def start(self, *, ready: bool = True) -> RunningPool:
        """Start `serve`, and wait until all workers are ready."""
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as file:
            command = [*GPUPOOL, "serve", "-c", str(self.file)]
            self.process = subprocess.Popen(
                command, env=self.env, stdout=out, stderr=file if self.stderr is None else self.stderr
            )
        if ready:
            self.wait(lambda s: s["pool"]["ready"] and not s["pool"]["degraded"])
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop it, and kill whatever is left."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process:
            self.process.wait(10)

    @property
    def pid(self) -> int:
        """The supervisor's."""
        assert self.process
        return self.process.pid

    def pids(self) -> list[int]:
        """Live processes of this pool: those that carry its folder in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    mine = f"TOY_LOG={self.toy_log}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    if mine and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(entry.name))
        return found

    def cli(self, *args: str, timeout: float = 40.0) -> subprocess.CompletedProcess[str]:
        """Run one command against this pool."""
        command = [*GPUPOOL, *args, "--runtime-dir", str(self.runtime)]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False)

    def ask(self, verb: str, **args: Any) -> dict[str, Any]:
        """Speak to the control socket directly: cheaper than a command."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(5)
            s.connect(str(self.runtime / "control.sock"))
            s.sendall(json.dumps({"verb": verb, **args}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(s.makefile().readline())
            return answer

    def status(self) -> dict[str, Any]:
        """The status document."""
        result: dict[str, Any] = self.ask("status")["result"]
        return result

    def wait(self, condition: Callable[[dict[str, Any]], Any], within: float = 30.0) -> dict[str, Any]:
        """Wait until the status document fulfils a condition."""
        last: dict[str, Any] | None = None
        for _ in until(within):
            assert self.process
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}: {self.text()[-2000:]}"
            with contextlib.suppress(OSError, ValueError):
                last = self.status()
                if condition(last):
                    return last
        raise AssertionError(f"not within {within} s; last status: {json.dumps(last)[:1500]}; {self.text()[-1500:]}")

    def wait_for_incarnation(self, slot: int, incarnation: int) -> None:
        """Wait until a slot's process is that new, and ready."""
        self.wait(lambda s: s["workers"][slot]["incarnation"] >= incarnation and s["workers"][slot]["state"] == "ready")

    def worker(self, slot: int) -> dict[str, Any]:
        """One worker's part of the status document."""
        found: dict[str, Any] = self.status()["workers"][slot]
        return found

    def text(self) -> str:
        """All that it wrote."""
        return (self.folder / "out").read_text(errors="replace") + (self.folder / "err").read_text(errors="replace")

    def records(self, event: str | None = None, *, least: int = 0) -> list[dict[str, Any]]:
        """Its log records; a line that is just being written, in either file, is none yet.

        Who expects some waits for `least`: processes log by a thread, and tell other things sooner.
        """
        for _ in until(10.0):
            texts = [(self.folder / name).read_text(errors="replace") for name in ("out", "err")]
            records = [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]
            found = [r for r in records if event in (None, r["event"])]
            if len(found) >= least:
                break
        return found

    def notes(self, event: str = "forward") -> list[dict[str, Any]]:
        """What the toy model noted."""
        if not self.toy_log.exists():
            return []
        return [n for n in map(json.loads, self.toy_log.read_text().splitlines()) if n["event"] == event]

    def client(self, kind: int = zmq.DEALER, identity: bytes | None = None) -> RawClient:
        """A client made of pyzmq and msgpack alone."""
        return RawClient(f"tcp://127.0.0.1:{self.port}", kind, identity)


class RawClient:
    """Speaks the wire protocol by hand."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER, identity: bytes | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger = 0
        self.socket.rcvhwm = self.socket.sndhwm = 0
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)
        self._made = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave at once."""
        self.socket.close(0)
        self._context.term()

    def send(self, sample: Any, *buffers: bytes, **header: Any) -> str:
        """Send one request; returns its id."""
        self._made += 1
        header = {"v": 1, "id": str(self._made), **header}
        self.socket.send_multipart([msgpack.packb(header), msgpack.packb(sample), *buffers])
        return str(header["id"])

    def receive(self, within: float = 10.0) -> tuple[dict[str, Any], Any] | None:
        """The next reply's header and body."""
        if not self.socket.poll(int(within * 1000)):
            return None
        header, body, *_ = self.socket.recv_multipart()
        return msgpack.unpackb(header), msgpack.unpackb(body) if body else None

    def call(self, sample: Any, *, within: float = 10.0, **header: Any) -> tuple[dict[str, Any], Any]:
        """Send one request and wait for its reply; others that come before are dropped."""
        wanted = self.send(sample, **header)
        end = time.monotonic() + within
        while (left := end - time.monotonic()) > 0 and (reply := self.receive(left)):
            if reply[0].get("id") == wanted:
                return reply
        raise AssertionError(f"no reply to {wanted} within {within} s")

    def collect(self, count: int, within: float = 30.0) -> dict[str, tuple[dict[str, Any], Any]]:
        """That many replies by id; fails when one comes twice or some stay away."""
        replies: dict[str, tuple[dict[str, Any], Any]] = {}
        end = time.monotonic() + within
        while len(replies) < count:
            reply = self.receive(max(0.0, end - time.monotonic()))
            assert reply, f"{len(replies)} of {count} replies within {within} s"
            assert reply[0]["id"] not in replies, f"second reply: {reply[0]}"
            replies[reply[0]["id"]] = reply
        return replies


class Load(threading.Thread):
    """An open-loop client: sends at a rate and remembers every reply. `stop` ends the sending and waits for what is open.

    `sample` may be a function that makes the n-th.
    """

    def __init__(self, pool: RunningPool, *, rate: float, sample: Any = None, **header: Any) -> None:
        super().__init__(daemon=True)
        self._pool, self._rate, self._sample, self._header = pool, rate, sample or {"i": 0}, header
        self._ending = threading.Event()
        self.sent: dict[str, float] = {}
        self.replies: dict[str, dict[str, Any]] = {}
        self.latencies: list[float] = []
        self.twice = 0
        self.start()

    def run(self) -> None:
        """Send and receive on one thread, as ZeroMQ sockets want it."""
        with self._pool.client() as client:
            began = time.monotonic()
            while not self._ending.is_set():
                due = (time.monotonic() - began) * self._rate
                while len(self.sent) < due:
                    sample = self._sample(len(self.sent)) if callable(self._sample) else self._sample
                    self.sent[client.send(sample, **self._header)] = time.monotonic()
                self._take(client, 0.002)
            end = time.monotonic() + 35.0
            while len(self.replies) < len(self.sent) and time.monotonic() < end:
                self._take(client, 0.1)

    def _take(self, client: RawClient, wait: float) -> None:
        while reply := client.receive(wait):
            name = reply[0]["id"]
            self.twice += name in self.replies
            self.replies[name] = reply[0]
            self.latencies.append(time.monotonic() - self.sent[name])
            wait = 0.0

    def wait_for(self, replies: int, within: float = 20.0) -> None:
        """Wait until that many more replies have come."""
        goal = len(self.replies) + replies
        for _ in until(within):
            if len(self.replies) >= goal:
                return
        raise AssertionError(f"{len(self.replies)} of {goal} replies within {within} s")

    def stop(self) -> Counter[str]:
        """End it; fails when a request got no reply or two. Returns the codes."""
        self._ending.set()
        self.join(60.0)
        assert not self.twice
        assert len(self.replies) == len(self.sent)
        return Counter(r["code"] for r in self.replies.values())


def until(within: float, every: float = 0.02) -> Iterator[None]:
    """Yield again and again until the deadline has passed."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        yield
        time.sleep(every)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
