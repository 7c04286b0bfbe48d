"""Log records to a Fluentd (or Fluent Bit) forward input: a thread of its own with a bounded queue, acknowledgements and back-off.

Protocol: Forward v1, PackedForward mode: `[tag, entries, {"chunk": id, "size": n}]`, each entry `[EventTime, record]` with the record as in
the log's line. A chunk is kept until `{"ack": id}` came and is sent again, with the same id, over the next connection: every record that
the queue did not have to give up arrives at least once, and twice when only its acknowledgement was lost.

Why not the library fluent-logger: it sends on the caller's thread, where a black-holed Fluentd cost 3.0 s on each record, its
asynchronous form blocks the caller when its queue is full or throws the whole queue away, and it knows no acknowledgements: bytes that
the kernel had taken were lost with the connection.

Not done here: TLS and shared keys. Forward to a Fluentd or Fluent Bit on this host, which does both. Names are looked up by the system's
resolver, whose time this thread cannot limit; an address avoids that.
"""

from __future__ import annotations

import base64
import random
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgpack
import orjson

from gpupool.log_queue import LogQueue, Record
from gpupool.log_sink import iso, render_json

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

#: One attempt: connection, sending and acknowledgement of one chunk.
ATTEMPT_S: Final = 2.0
#: After the first failure and at most. With one attempt's time it stays below 10 s: so soon is delivery resumed.
BACKOFF_S: Final = (0.5, 7.5)
#: How long records are gathered before a chunk is sent.
_LINGER_S: Final = 0.1
#: A receiver has to take a chunk within one attempt: 32 kB/s are enough.
CHUNK_BYTES: Final = 64 << 10
_CHUNK_RECORDS: Final = 1000
MAX_BYTES: Final = 16 << 20
_MAX_ANSWER_BYTES: Final = 4096


class ForwardError(Exception):
    """What came back is no acknowledgement of what was sent."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records on their way, and the message that carries them."""

    id: str
    records: list[Record]
    message: bytes


def pack_entry(record: Record) -> bytes:
    """Make one entry: the instant as an EventTime, and the record as its line has it, made of plain types and cut to length."""
    seconds, rest = divmod(float(record.get("time", 0.0)), 1.0)
    instant = msgpack.ExtType(0, struct.pack(">II", int(seconds), int(rest * 1e9)))
    # A record is shared with the sink, whose thread fills this in when it comes to it.
    whole = record if record.get("timestamp") else {**record, "timestamp": iso(record.get("time", 0.0))}
    packed: bytes = msgpack.packb([instant, orjson.loads(render_json(whole))])
    return packed


def pack_chunk(tag: str, records: list[Record], entries: list[bytes]) -> Chunk:
    """Make the message of some entries, under a name of its own."""
    name = base64.b64encode(secrets.token_bytes(16)).decode()
    return Chunk(name, records, msgpack.packb([tag, b"".join(entries), {"chunk": name, "size": len(entries)}]))


def backoff_s(failures: int, rng: random.Random) -> float:
    """How long to rest after that many failures in a row; half of it by chance, so that processes do not come back in step."""
    first, most = BACKOFF_S
    return float(min(most, first * 2 ** min(failures - 1, 10)) * rng.uniform(0.5, 1.0))


class Forwarder:
    """The queue and its thread.

    Args:
        address: "HOST:PORT".
        tag: of all records.
        size: how many records may wait.
        stamp: fields of every record made here.
        event: told when the receiver cannot be reached any more, and when it can again.
    """

    def __init__(
        self,
        address: str,
        tag: str,
        *,
        size: int = 10000,
        max_bytes: int = MAX_BYTES,
        stamp: Record | None = None,
        event: FilteringBoundLogger | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._tag = tag
        self._stamp = stamp or {}
        self.event = event
        self._queue = LogQueue(size, max_bytes)
        self.put = self._queue.put
        #: Records lost, by level.
        self.dropped = self._queue.dropped
        self._rng = random.Random()
        self._chunk: Chunk | None = None
        self._socket: socket.socket | None = None
        self._up: bool | None = None
        self._sent = 0
        self._ending = threading.Event()
        self._end_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """Tell to where, whether the last attempt succeeded, how many records were acknowledged, given up, and wait."""
        chunk = self._chunk
        waiting = len(self._queue) + (len(chunk.records) if chunk else 0)
        host, port = self._address
        told = {"sent": self._sent, "dropped": self.dropped.total(), "waiting": waiting}
        return {"address": f"{host}:{port}", "up": bool(self._up), **told}

    def end(self, timeout_s: float) -> None:
        """Begin to end: send what waits for at most `timeout_s`, without resting after a failure."""
        self._end_at = time.monotonic() + timeout_s
        self._ending.set()
        self._queue.filled.set()

    def join(self) -> None:
        """Wait for the end, no longer than `end` allowed."""
        self._thread.join(max(0.0, self._end_at - time.monotonic()))

    def _run(self) -> None:
        failures = 0
        while True:
            self._queue.filled.wait()
            self._ending.wait(_LINGER_S)
            self._queue.filled.clear()
            while chunk := self._next_chunk():
                try:
                    self._deliver(chunk)
                except Exception as e:  # whatever it was, the thread goes on; told once
                    failures += 1
                    self._disconnect()
                    self._turned(f"{type(e).__name__}: {e}")
                    if self._ending.is_set():
                        self._queue.lose(chunk.records)
                        return
                    self._ending.wait(backoff_s(failures, self._rng))
                else:
                    failures = 0
                    self._chunk = None
                    self._sent += len(chunk.records)
                    self._turned()
            if self._ending.is_set():
                self._disconnect()
                return

    def _next_chunk(self) -> Chunk | None:
        """Return the chunk under way, or make one of what waits."""
        if self._chunk:
            return self._chunk
        records: list[Record] = []
        entries: list[bytes] = []
        size = 0
        if told := self._queue.take_losses():
            entries.append(pack_entry(self._loss_record(told)))
        while size < CHUNK_BYTES and len(records) < _CHUNK_RECORDS and (taken := self._queue.take(1)):
            (record,) = taken
            try:
                entry = pack_entry(record)
            except Exception:  # one record that cannot be packed must not hold up the others
                self._queue.lose([record])
                continue
            records.append(record)
            entries.append(entry)
            size += len(entry)
        if entries:
            self._chunk = pack_chunk(self._tag, records, entries)
        return self._chunk

    def _deliver(self, chunk: Chunk) -> None:
        """Send a chunk and wait for its acknowledgement.

        Raises:
            OSError: no connection, or not in time.
            ForwardError: the answer is another.
        """
        until = min(time.monotonic() + ATTEMPT_S, self._end_at)
        if self._socket is None:
            self._socket = _connect(*self._address, until)
        self._socket.settimeout(_left_s(until))
        self._socket.sendall(chunk.message)
        unpacker = msgpack.Unpacker(max_buffer_size=_MAX_ANSWER_BYTES)
        while True:
            self._socket.settimeout(_left_s(until))
            if not (data := self._socket.recv(_MAX_ANSWER_BYTES)):
                raise ForwardError("the receiver closed the connection")
            unpacker.feed(data)
            for answer in unpacker:
                if not isinstance(answer, dict) or answer.get("ack") != chunk.id:
                    raise ForwardError("the receiver's answer is not the acknowledgement of what was sent")
                return

    def _disconnect(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None

    def _turned(self, error: str = "") -> None:
        up, before = not error, self._up
        self._up = up
        if self.event is None or up is before:
            return
        host, port = self._address
        if up:
            self.event.info("log_forward_up", address=f"{host}:{port}")
        else:
            self.event.warning("log_forward_down", address=f"{host}:{port}", error=error)

    def _loss_record(self, told: Counter[str]) -> Record:
        now = time.time()
        return {
            "time": now, "timestamp": iso(now), "level": "warning", "event": "log_records_dropped",
            **self._stamp, "dropped": dict(told), "way": "forward",
        }  # fmt: skip


def _connect(host: str, port: int, until: float) -> socket.socket:
    """Connect to the first of a name's addresses that answers; all together have the time left, each an even share of it.

    Raises:
        OSError: none did, or not in time.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError("the name has no address")
    for n, (family, kind, protocol, _, address) in enumerate(found):
        try:
            one = socket.socket(family, kind, protocol)
            try:
                one.settimeout(_left_s(until) / (len(found) - n))
                one.connect(address)
            except BaseException:
                one.close()
                raise
        except OSError as e:
            failure = e
        else:
            return one
    raise failure


def _left_s(until: float) -> float:
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left
