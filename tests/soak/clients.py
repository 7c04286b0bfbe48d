"""The soak's raw clients, each a process of its own: `python -m soak.clients KIND` with its job as JSON on stdin, its ledger as JSON on stdout.

A client knows each request it sent by number, and what may become of it. What came of it is checked at once: the one reply, a code that this
request may get, and contents that are its own. `dealer`, `req`, `large` and `flood` are good citizens; `deaf` never reads, `rubbish` sends what
is no request, and between that must be served as well as any other.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
import zmq

from soak.ledger import ALWAYS, PATIENT_S, Ledger

#: After the end of its time a client waits so long for replies that it is still owed: no deadline is longer.
OWED_S: Final = 35.0
_OPEN: Final = 8
#: The id of rubbish that has a readable header.
JUNK: Final = "junk"


@dataclass(slots=True)
class Job:
    """What one client is to do."""

    kind: str
    endpoint: str
    seed: int
    seconds: float
    deadly: bool = False  # whether to send requests that kill workers
    strict: bool = False  # of the library's: hold it to no error that it could have tried again


@dataclass(slots=True)
class Asked:
    """One open request: what its reply must show."""

    n: int
    at: float
    may: frozenset[str]
    crc: int = 0
    back: bytes | None = None
    rows: int = 0  # of a `many` request
    kind: str = field(default="")


class Raw:
    """A DEALER or REQ socket with a ledger behind it."""

    def __init__(self, job: Job, kind: int = zmq.DEALER) -> None:
        self.job = job
        self.rng = random.Random(job.seed)
        self.ledger = Ledger(job.kind)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.connect(job.endpoint)
        self.open: dict[str | bytes, Asked] = {}
        self.until = time.monotonic() + job.seconds
        self._done: set[str | bytes] = set()
        self._made = 0

    @property
    def over(self) -> bool:
        """Whether the time to send is over."""
        return time.monotonic() >= self.until

    def number(self) -> int:
        """A number that no other client of this soak uses."""
        self._made += 1
        return self.job.seed * 10_000_000 + self._made

    def send(self, asked: Asked, body: Any, *buffers: bytes, **header: Any) -> str | bytes:
        """Send one request and enter it in the ledger."""
        # Other clients use the same names at the same time; some are texts, some bytes.
        name: str | bytes = str(self._made) if self._made % 5 else str(self._made).encode()
        self.open[name] = asked
        self.ledger.sent += 1
        self.socket.send_multipart([msgpack.packb({"v": 1, "id": name, **header}), msgpack.packb(body), *buffers])
        return name

    def take(self, wait_s: float) -> int:
        """Take in what comes within that time, or what is there once something came; return how many replies."""
        taken = 0
        while self.socket.poll(int(1000 * wait_s)):
            wait_s = 0.0
            frames = self.socket.recv_multipart()
            header = msgpack.unpackb(frames[0])
            name = header.get("id")
            asked = self.open.pop(name, None)
            if asked is None:
                if name == JUNK:
                    self.ledger.codes["(to rubbish)"] += 1
                elif name in self._done:
                    self.ledger.violation(f"a second reply to {name!r}: {header['code']}")
                elif name is not None:
                    self.ledger.violation(f"a reply to nobody's request {name!r}: {header['code']}")
                continue
            self._done.add(name)
            taken += 1
            judge(self.ledger, asked, header, frames[1:])
        return taken

    def settle(self) -> None:
        """Wait for what is still owed; what does not come is missing."""
        end = time.monotonic() + OWED_S
        while self.open and time.monotonic() < end:
            self.take(0.2)
        for name in list(self.open)[:5]:
            self.ledger.violation(f"no reply to {name!r} ({self.open[name].kind})")
        self.ledger.missing = len(self.open)
        self.take(0.3)  # second replies would come about now


def judge(ledger: Ledger, asked: Asked, header: dict[str, Any], frames: list[bytes]) -> None:
    """Check one reply against its request."""
    code = header["code"]
    ledger.reply(code, time.monotonic() - asked.at)
    if code not in asked.may:
        ledger.violation(f"{asked.kind} was answered {code}: {header.get('message')}")
    if code != "ok":
        return
    result = msgpack.unpackb(frames[0])
    results = result if asked.rows else [result]
    if asked.rows and len(result) != asked.rows:
        ledger.violation(f"{asked.kind} of {asked.rows} rows got {len(result)}")
    for row, one in enumerate(results):
        wanted = {"n": asked.n + row, "crc": asked.crc}
        if {key: one.get(key) for key in wanted} != wanted or (asked.back is not None and one.get("b") != asked.back):
            ledger.violation(f"{asked.kind} {asked.n} got contents of another: {str(one)[:80]}")


def dealer(job: Job) -> Ledger:
    """All kinds of small requests at once, some of them cancelled."""
    raw = Raw(job)
    deadly_at = time.monotonic() + job.seconds / 3 if job.deadly else float("inf")
    while not raw.over:
        while len(raw.open) < _OPEN:
            if time.monotonic() > deadly_at:
                deadly_at += max(10.0, job.seconds / 6)
                n = raw.number()
                may = frozenset({"poison", "worker_lost", *ALWAYS})
                raw.send(Asked(n, time.monotonic(), may, kind="a deadly request"), {"n": n, "do": "kill"}, timeout_ms=20_000)
            else:
                mixed(raw)
        raw.take(0.05)
    raw.settle()
    return raw.ledger


def mixed(raw: Raw) -> None:
    """Send one request of a random sort."""
    rng, now, n = raw.rng, time.monotonic(), raw.number()
    header: dict[str, Any] = {"timeout_ms": int(1000 * PATIENT_S), "priority": rng.randrange(10)}
    data = rng.randbytes(rng.randrange(2000))
    sample = {"n": n, "b": data, "sleep": rng.choice([0.0, 0.0, 0.005, 0.03])}
    crc = zlib.crc32(data)
    match rng.choices(["plain", "short", "cancel", "many", "once", "bad"], [40, 15, 10, 15, 10, 10])[0]:
        case "short":
            header["timeout_ms"] = rng.choice([1, 5, 20, 100])
            raw.send(Asked(n, now, ALWAYS | {"deadline_exceeded"}, crc, kind="a short deadline"), sample, **header)
        case "cancel":
            name = raw.send(Asked(n, now, ALWAYS | {"cancelled"}, crc, kind="a cancelled request"), sample, **header)
            if rng.random() < 0.5:
                raw.take(rng.random() / 100)
            raw.socket.send_multipart([msgpack.packb({"v": 1, "type": "cancel", "id": name})])
        case "many":
            rows = rng.randrange(1, 12)
            for _ in range(rows - 1):
                raw.number()
            body = [{**sample, "n": n + row} for row in range(rows)]
            raw.send(Asked(n, now, ALWAYS, crc, rows=rows, kind="a many request"), body, many=True, **header)
        case "once":
            raw.send(
                Asked(n, now, ALWAYS | {"worker_lost"}, crc, kind="a request without retry"), sample, retry=False, **header
            )
        case "bad":
            may = (ALWAYS | {"model_error"}) - {"ok"}
            raw.send(Asked(n, now, may, crc, kind="a sample that raises"), {**sample, "do": "raise"}, **header)
        case _:
            raw.send(Asked(n, now, ALWAYS, crc, kind="a plain request"), sample, **header)


def req(job: Job) -> Ledger:
    """One request after the other, without ids, from a REQ socket."""
    raw = Raw(job, zmq.REQ)
    while not raw.over:
        n, data = raw.number(), raw.rng.randbytes(100)
        asked = Asked(n, time.monotonic(), ALWAYS, zlib.crc32(data), kind="a REQ request")
        raw.ledger.sent += 1
        raw.socket.send_multipart([msgpack.packb({"v": 1}), msgpack.packb({"n": n, "b": data})])
        if not raw.socket.poll(int(1000 * OWED_S)):
            raw.ledger.missing = 1
            raw.ledger.violation("no reply to a REQ request")
            return raw.ledger
        header, *frames = raw.socket.recv_multipart()
        judge(raw.ledger, asked, msgpack.unpackb(header), frames)
        time.sleep(0.01)
    return raw.ledger


def large(job: Job) -> Ledger:
    """Bodies of up to some megabytes, there and back."""
    raw = Raw(job)
    block = raw.rng.randbytes(4 << 20)
    while not raw.over:
        if len(raw.open) < 2:
            n = raw.number()
            at = raw.rng.randrange(1 << 20)
            data = block[at : at + raw.rng.choice([20_000, 300_000, 1_500_000, 3_000_000])]
            asked = Asked(n, time.monotonic(), ALWAYS, zlib.crc32(data), data, kind="a large request")
            raw.send(asked, {"n": n, "b": data, "back": True}, timeout_ms=int(1000 * PATIENT_S))
        raw.take(0.1)
    raw.settle()
    return raw.ledger


def flood(job: Job) -> Ledger:
    """Hundreds at once, far more than may wait, again and again."""
    raw = Raw(job)
    while not raw.over:
        for _ in range(600):
            n = raw.number()
            asked = Asked(n, time.monotonic(), ALWAYS | {"deadline_exceeded"}, kind="one of a flood")
            raw.send(asked, {"n": n, "sleep": 0.002}, timeout_ms=5_000)
        while raw.open and not raw.over:
            raw.take(0.1)
        raw.take(raw.rng.uniform(0.5, 2.0))
    raw.settle()
    return raw.ledger


def deaf(job: Job) -> Ledger:
    """Ask for large answers and never read one, through several connections one after the other."""
    ledger = Ledger(job.kind)
    rng, until = random.Random(job.seed), time.monotonic() + job.seconds
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    while time.monotonic() < until:
        sock = context.socket(zmq.DEALER)
        sock.linger = 0
        sock.setsockopt(zmq.RCVHWM, 1)
        sock.setsockopt(zmq.RCVBUF, 4096)
        sock.connect(job.endpoint)
        data = rng.randbytes(100_000)
        for n in range(200):
            sock.send_multipart([msgpack.packb({"v": 1, "id": str(n)}), msgpack.packb({"n": n, "b": data, "back": True})])
            ledger.sent += 1
            time.sleep(0.01)
        time.sleep(min(8.0, max(0.0, until - time.monotonic())))
        sock.close(0)
    return ledger


def rubbish(job: Job) -> Ledger:
    """What is no request, as messages and as bytes on the port; a request in between is served all the same."""
    raw = Raw(job)
    rng = raw.rng
    host, port = job.endpoint.removeprefix("tcp://").split(":")
    while not raw.over:
        for _ in range(rng.randrange(1, 6)):
            raw.socket.send_multipart(junk(rng))
            raw.ledger.junk += 1
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            text = rng.choice([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", rng.randbytes(1 << 16), b"\xff", b""])
            try:
                stranger.sendall(text)
            except OSError:  # hung up on us already, which is its right
                raw.ledger.junk += 1
        n = raw.number()
        raw.send(Asked(n, time.monotonic(), ALWAYS, kind="a request after rubbish"), {"n": n}, timeout_ms=int(1000 * PATIENT_S))
        end = time.monotonic() + OWED_S
        while raw.open and time.monotonic() < end:
            raw.take(0.2)
        time.sleep(0.1)
    raw.settle()
    return raw.ledger


def junk(rng: random.Random) -> list[bytes]:
    """One message that is no good request; where it can name an id, it is one that no good request has."""
    good = msgpack.packb({"v": 1, "id": JUNK})
    makers: list[Callable[[], list[bytes]]] = [
        lambda: [b"\xc1" + rng.randbytes(rng.randrange(200)), b"x"],
        lambda: [rng.randbytes(5000)],
        lambda: [msgpack.packb({"v": 1, "id": JUNK, "pad": "x" * 5000}), b"\x01"],
        lambda: [msgpack.packb({"v": 1, "id": JUNK, "type": rng.choice([7, "explode", None, []])}), b"\x01"],
        lambda: [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"],
        lambda: [b"\x91" * 3000],
        lambda: [good],
        lambda: [good, *[b"x"] * 300],
        lambda: [good, b"\xc1"],
        lambda: [good, msgpack.packb({"n": 1, "deep": deep(60)})],
        lambda: [msgpack.packb({"v": 1, "id": JUNK, "many": True}), b"\xdd\x00\x10\x00\x00"],
        lambda: [good, b"\x80", b"unused buffer"],
        lambda: [b"GET / HTTP/1.1\r\n\r\n"],
        lambda: [b"", b"", b"", b""],
    ]
    return rng.choice(makers)()


def deep(levels: int) -> Any:
    """A list in a list in a list …"""
    node: Any = 0
    for _ in range(levels):
        node = [node]
    return node


KINDS: Final[dict[str, Callable[[Job], Ledger]]] = {
    "dealer": dealer, "req": req, "large": large, "flood": flood, "deaf": deaf, "rubbish": rubbish,
}  # fmt: skip


def main() -> None:
    """Run one client."""
    job = Job(**json.load(sys.stdin))
    if job.kind in KINDS:
        ledger = KINDS[job.kind](job)
    else:
        from soak.library import KINDS as LIBRARY

        ledger = LIBRARY[job.kind](job)
    print(ledger.dump())


if __name__ == "__main__":
    main()
