"""Load from a process of its own: so many connections, with so many requests open all the time or at so many a second, and all that came of it.

Started as `python -m demonstrations.load` with a `Job` as JSON on stdin; `run` does that and returns the `Seen`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import msgpack

from bench.many_clients import ManyClients
from support.running import RunningPool

#: How long after its end a load waits for replies that it is owed: the longest deadline, and some.
_OWED_S: Final = 40.0
#: A reply with this code and an execution behind it was refused by the model, not by the pool.
REFUSED_BY_MODEL: Final = "refused by the model"


@dataclass(frozen=True, slots=True)
class Job:
    """What to send. Either `open` requests at any time, or `rate` a second whatever comes back."""

    endpoint: str
    seconds: float
    connections: int = 1
    open: int = 0
    rate: float = 0.0
    body_bytes: int = 0
    timeouts_ms: tuple[int | None, ...] = (None,)  # in turn; None: brings none
    refuse_every: int = 0  # every so many requests ask the model to refuse them
    poisson: int = 0  # with `rate`: at random, by this seed; 0: evenly
    bodies: tuple[str, ...] = ()  # msgpack as hex, in turn, instead of random bytes


@dataclass(slots=True)
class Seen:
    """What came of it. Latencies in seconds by code, instants in seconds from the start."""

    sent: int = 0
    unanswered: int = 0
    strays: int = 0  # second replies, and replies to nobody
    latencies: dict[str, list[float]] = field(default_factory=dict)
    ok_at: list[float] = field(default_factory=list)
    by_worker: dict[str, int] = field(default_factory=dict)
    forwards_ms: list[float] = field(default_factory=list)
    queues_ms: list[float] = field(default_factory=list)  # in the worker, before forward
    order: list[tuple[float, str, int]] = field(default_factory=list)  # at, code, worker (-1: none), as they came

    @property
    def codes(self) -> Counter[str]:
        """Replies by code."""
        return Counter({code: len(latencies) for code, latencies in self.latencies.items()})

    def ok_per_s(self, begin_s: float, end_s: float) -> float:
        """Good replies a second between two instants."""
        return sum(begin_s <= at < end_s for at in self.ok_at) / (end_s - begin_s)

    def merge(self, other: Seen) -> Self:
        """Add what another process saw in the same time."""
        self.sent += other.sent
        self.unanswered += other.unanswered
        self.strays += other.strays
        for code, latencies in other.latencies.items():
            self.latencies.setdefault(code, []).extend(latencies)
        self.ok_at += other.ok_at
        self.by_worker = dict(Counter(self.by_worker) + Counter(other.by_worker))
        self.forwards_ms += other.forwards_ms
        self.queues_ms += other.queues_ms
        self.order = sorted(self.order + other.order)
        return self


def percentile(values: list[float], share: float) -> float:
    """The value below which that share lies; infinite without any, so that a bound on nothing is not held."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def start(job: Job) -> subprocess.Popen[str]:
    """Start a load; `finish` waits for it."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "demonstrations.load"],
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    process.stdin.write(json.dumps(asdict(job)))
    process.stdin.close()
    process.stdin = None
    return process


def finish(process: subprocess.Popen[str]) -> Seen:
    """Wait for a load's end and return what it saw."""
    text, _ = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(f"a load ended with {process.returncode}")
    values = json.loads(text)
    return Seen(**{**values, "order": [(at, code, worker) for at, code, worker in values["order"]]})


def run(job: Job) -> Seen:
    """Run one load."""
    return finish(start(job))


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Instants of a Poisson process, the same ones for the same seed."""
    rng, at, found = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(at)
    return found


def endpoint(pool: RunningPool) -> str:
    """Where a pool's clients connect."""
    return f"tcp://127.0.0.1:{pool.port}"


def send_all(job: Job) -> Seen:
    """Be the load."""
    clients, seen = ManyClients(job.endpoint, job.connections), Seen()
    data = os.urandom(job.body_bytes)
    bodies = [bytes.fromhex(text) for text in job.bodies]
    due = arrivals(job.rate, job.seconds, job.poisson) if job.poisson else []
    body, refused = msgpack.packb({"b": data}), msgpack.packb({"b": data, "do": "refuse"})
    open_: dict[str, float] = {}
    began = time.monotonic()

    def send(connection: int) -> None:
        seen.sent += 1
        name = str(seen.sent)
        header: dict[str, Any] = {"v": 1, "id": name}
        timeout_ms = job.timeouts_ms[seen.sent % len(job.timeouts_ms)]
        if timeout_ms is not None:
            header["timeout_ms"] = timeout_ms
        open_[name] = time.monotonic()
        ask_refusal = job.refuse_every and seen.sent % job.refuse_every == 0
        clients.send(
            connection, [msgpack.packb(header), refused if ask_refusal else bodies[seen.sent % len(bodies)] if bodies else body]
        )

    def take(wait_ms: int) -> int | None:
        if (message := clients.receive(wait_ms)) is None:
            return None
        now, (connection, frames) = time.monotonic(), message
        header = msgpack.unpackb(frames[0])
        sent_at = open_.pop(header.get("id"), None)
        if sent_at is None:
            seen.strays += 1
            return connection
        code = header["code"]
        if code == "overloaded" and header.get("attempts"):
            code = REFUSED_BY_MODEL
        seen.latencies.setdefault(code, []).append(now - sent_at)
        worker = header.get("worker", -1)
        seen.order.append((now - began, code, worker))
        if code == "ok":
            seen.ok_at.append(now - began)
            seen.by_worker[str(worker)] = seen.by_worker.get(str(worker), 0) + 1
            seen.forwards_ms.append(header["timings_ms"]["forward"])
            seen.queues_ms.append(header["timings_ms"]["queue"])
        return connection

    for number in range(job.open):
        send(number % job.connections)
    while (elapsed := time.monotonic() - began) < job.seconds:
        if job.open:
            if (connection := take(100)) is not None:
                send(connection)
        else:
            while (seen.sent < len(due) and due[seen.sent] <= elapsed) if job.poisson else seen.sent < elapsed * job.rate:
                send(seen.sent % job.connections)
                while take(0) is not None:
                    pass
            take(1)
    end = time.monotonic() + _OWED_S
    while open_ and time.monotonic() < end:
        take(200)
    seen.unanswered = len(open_)
    clients.close()
    return seen


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(
        json.dumps(
            asdict(send_all(Job(**{**given, "timeouts_ms": tuple(given["timeouts_ms"]), "bodies": tuple(given["bodies"])})))
        )
    )
