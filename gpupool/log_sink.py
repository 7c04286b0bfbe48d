"""A bounded queue and one thread between a program and its log: putting a record never blocks and never raises.

What the queue had to give up is counted by level and told in one record once there is room again. Lines are written whole, several in one write() but never above MAX_LINE_BYTES: that is PIPE_BUF, up to which the
kernel does not mix the writes of several processes into one pipe; into a file, where it never does, they are longer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import orjson

from gpupool.log_file import LogFile
from gpupool.log_queue import LogQueue, Record

MAX_LINE_BYTES: Final = 4096
#: How long records are gathered before they are written: few that come soon out, many at less cost. A process that dies loses that much.
#: Measured at 17,700 records a second: 4.5 us of CPU a record with the short time alone, 3.9 with both.
_LINGER_S: Final = 0.002
_BUSY_LINGER_S: Final = 0.02
_BUSY: Final = 10
#: A process that has nothing to say looks at its file so often: see LogFile.look.
_LOOK_EVERY_S: Final = 5.0
_MAX_DEPTH: Final = 8
_AT_A_TIME: Final = 200
MAX_BYTES: Final = 16 << 20


def render_json(record: Record) -> bytes:
    """Make one JSON line of a record, whatever it holds: NaN becomes null, bytes and odd objects become text, long ones are cut."""
    try:
        line = orjson.dumps(record, default=_plain)
    except Exception:  # a lone surrogate, a key that is no text, an integer beyond 64 bits: the record must still come out
        line = orjson.dumps(tame(record))
    if len(line) < MAX_LINE_BYTES:
        return line + b"\n"
    return _cut(record, len(line)) + b"\n"


def _cut(record: Record, size: int) -> bytes:
    """Shorten the longest texts until the line fits: a record keeps all its keys, and says how long it was."""
    kept = {k: v if isinstance(v, (int, float, str, type(None))) else _safe(v) for k, v in tame(record).items()}
    before = record.get("cut_from_bytes")  # who made the record may have cut it already
    kept["cut_from_bytes"] = max(size, before) if isinstance(before, int) else size
    for room in (3000, 1500, 700, 300, 100, 40, 10):
        # The end of a long text says more than its start: the error of a traceback, the last words of a dump.
        short = {k: (v if not isinstance(v, str) or len(v) <= room else "…" + v[-room:]) for k, v in kept.items()}
        line = orjson.dumps(short)
        if len(line) < MAX_LINE_BYTES:
            return line
    names = ("time", "timestamp", "level", "event", "component", "pid", "cut_from_bytes")
    return orjson.dumps({k: short[k] for k in names if k in short})


def tame(value: Any, depth: int = 0) -> Any:
    """Rebuild a value of plain JSON types only; what nests too deep becomes text."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return value
    if depth < _MAX_DEPTH:
        if isinstance(value, dict):
            return {_safe(k): tame(v, depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return [tame(v, depth + 1) for v in value]
    return _safe(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, (set, frozenset, tuple, deque)):
        return list(value)
    return _safe(value)


def _safe(value: Any) -> str:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception as e:
        text = f"<{type(value).__name__}: {type(e).__name__} in str()>"
    return text.encode("utf-8", "replace").decode("utf-8")


def iso(now: float) -> str:
    """ISO 8601 in UTC, of epoch seconds."""
    seconds, rest = divmod(round(now * 1e6), 1_000_000)
    return f"{_iso_second(seconds)}.{rest:06}+00:00"


@lru_cache(2)
def _iso_second(seconds: int) -> str:
    # Thousands of records share a second, and this part costs four times as much as the rest.
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class LogSink:
    """The queue and its thread.

    Args:
        out: where lines go, or its descriptor.
        size: how many records may wait.
        max_bytes: how much text may wait in them, about.
        render: record to line.
        stamp: fields of every record that the sink itself makes.
    """

    def __init__(
        self,
        out: LogFile | int,
        *,
        size: int = 10000,
        max_bytes: int = MAX_BYTES,
        render: Callable[[Record], bytes] = render_json,
        stamp: Record | None = None,
    ) -> None:
        self._out = LogFile(out) if isinstance(out, int) else out
        self._queue = LogQueue(size, max_bytes)
        self._render = render
        self._stamp = stamp or {}
        self._closing = False
        #: Queue one record: the queue's own, for the one call that a hot path makes.
        self.put = self._queue.put
        #: Records lost, by level.
        self.dropped = self._queue.dropped
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, for at most `timeout_s`; what is left then, or comes later, counts as lost. Once is enough."""
        if self._closing:
            return
        self._closing = True
        self._queue.filled.set()
        self._thread.join(timeout_s)
        self._queue.end()

    def _run(self) -> None:
        filled = self._queue.filled
        written = 0
        while True:
            if not filled.wait(_LOOK_EVERY_S):
                with suppress(Exception):  # nothing that befalls the way out may end the log
                    self._out.look()
                continue
            if not self._closing:  # one wake-up for many records: each costs the program's own threads a turn
                time.sleep(_LINGER_S if written < _BUSY else _BUSY_LINGER_S)
            filled.clear()
            written = 0
            try:
                while some := self._write_some():
                    written += some
            except Exception:  # whatever it was, the thread goes on: without it all that comes would vanish
                self._queue.lose([{"level": "error"}])
            if self._closing:
                return

    def _write_some(self) -> int:
        """Write some of what waits, several lines at a time; returns how many that were."""
        if told := self._queue.take_losses():
            self._tell_losses(told)
        records = self._queue.take(_AT_A_TIME)
        begin = size = 0
        lines: list[bytes] = []
        most = self._out.write_bytes
        for n, record in enumerate(records):
            line = self._line(record)
            if lines and size + len(line) > most:
                self._write(lines, records[begin:n])
                begin, size, lines = n, 0, []
            lines.append(line)
            size += len(line)
        if lines:
            self._write(lines, records[begin:])
        return len(records)

    def _tell_losses(self, told: Counter[str]) -> None:
        line = self._render(self._loss_record(told))
        if self._written(line) < len(line):
            self._queue.put_back_losses(told)

    def _line(self, record: Record) -> bytes:
        # Made here and not where the record was: on a hot path the text of an instant costs as much as all the rest.
        if not record.get("timestamp"):
            record["timestamp"] = iso(record.get("time", 0.0))
        try:
            return self._render(record)
        except Exception as e:  # one record that cannot be rendered must not end the log
            now = time.time()
            return render_json({
                "time": now, "timestamp": iso(now), "level": "error", "event": "log_record_unreadable", **self._stamp,
                "error": type(e).__name__,
            })  # fmt: skip

    def _write(self, lines: list[bytes], records: list[Record]) -> None:
        written = self._written(b"".join(lines))
        for line, record in zip(lines, records, strict=True):
            written -= len(line)
            if written < 0:
                self._queue.lose([record])

    def _written(self, lines: bytes) -> int:
        try:
            return self._out.write(lines)
        except Exception:  # nothing that befalls the way out may end the log
            return 0

    def _loss_record(self, told: Counter[str]) -> Record:
        now = time.time()
        return {
            "time": now, "timestamp": iso(now), "level": "warning", "event": "log_records_dropped",
            **self._stamp, "dropped": dict(told),
        }  # fmt: skip
