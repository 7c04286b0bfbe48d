"""Brings the spans of traced requests to a collector: a bounded queue, and one thread that builds and exports them.

Putting never blocks and never raises. A collector that is down, slow or refuses costs spans, which are counted, and nothing else.
OpenTelemetry's libraries are imported by the thread, so that neither the router's start nor a pool without traces pays for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gpupool.logs import Log
from gpupool.spec import TraceSpec

from .tracing import Finished

#: Requests whose spans may wait, about a KiB each.
MAX_WAITING: Final = 4096
#: Requests in one message to the collector, some six spans each; the groups of a turn are not torn apart, so it may be some more.
_MOST: Final = 256
#: How long spans are gathered before they are sent.
GATHER_S: Final = 0.5
#: One export, the exporter's own repetitions included.
EXPORT_TIMEOUT_S: Final = 5.0
#: What waits at the end may take this long.
_LAST_S: Final = 0.5
_TELL_EVERY_S: Final = 60.0
NO_SPANS: Final = {"sent": 0, "dropped": 0, "waiting": 0}

#: Builds and exports the spans of some requests; whether the collector took them.
Deliver = Callable[[Sequence[Finished]], bool]


class SpanExport:
    """The queue and its thread. Counts are requests, not spans.

    Args:
        deliver: what exports; default: OpenTelemetry's exporter, made in the thread.
    """

    def __init__(self, spec: TraceSpec, pool: str, log: Log, deliver: Deliver | None = None) -> None:
        self._spec = spec
        self._pool = pool
        self._log = log
        self._deliver = deliver
        self._waiting: deque[list[Finished]] = deque()
        self._count = 0  # of requests in it
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._closing = threading.Event()
        self._sent = 0
        self._dropped = 0
        self._failing = False
        self._told_at = -_TELL_EVERY_S
        self._due_at = float("inf")  # of the export under way
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, finished: list[Finished]) -> None:
        """Queue the requests of a turn; what has no room any more is dropped and counted."""
        with self._lock:
            room = MAX_WAITING - self._count
            if len(finished) > room:
                self._dropped += len(finished) - room
                finished = finished[:room]
            if finished:
                self._waiting.append(finished)
                self._count += len(finished)
        self._filled.set()
        if time.monotonic() > self._due_at:  # such as in the system's resolver, which has a time of its own
            self._warn("traces_not_taken", **self.stats())

    def stats(self) -> dict[str, int]:
        """Count requests whose spans the collector took, those that are lost, and those that wait or are on their way."""
        with self._lock:
            return {"sent": self._sent, "dropped": self._dropped, "waiting": self._count}

    def close(self) -> None:
        """Export what waits, for a bounded time."""
        self._closing.set()
        self._filled.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        deliver = self._deliver or self._exporter()
        while not self._closing.is_set() or self._waiting:
            self._filled.wait()
            self._closing.wait(GATHER_S)
            self._filled.clear()
            while finished := self._take():
                self._export(deliver, finished)

    def _exporter(self) -> Deliver:
        try:
            from .spans import SpanBuilder, open_exporter

            export = open_exporter(self._spec, EXPORT_TIMEOUT_S)
            builder = SpanBuilder(self._spec, self._pool)
        except Exception as e:  # a library that does not fit, a file that is gone: the pool serves on, untraced
            self._log.event.error("traces_unavailable", error=f"{type(e).__name__}: {e}")
            return lambda _: False
        return lambda finished: export(builder.spans(finished, time.time() - time.monotonic()))

    def _take(self) -> list[Finished]:
        taken: list[Finished] = []
        with self._lock:
            while self._waiting and len(taken) < _MOST:
                taken += self._waiting.popleft()
        return taken

    def _export(self, deliver: Deliver, finished: Sequence[Finished]) -> None:
        self._due_at = time.monotonic() + 2 * EXPORT_TIMEOUT_S  # building the spans has its time, too
        try:
            took = deliver(finished)
        except Exception as e:
            took = False
            self._warn("traces_failed", error=type(e).__name__)
        self._due_at = float("inf")
        with self._lock:
            # Until now they counted as waiting: what is on its way is in memory, too.
            self._count -= len(finished)
            if took:
                self._sent += len(finished)
            else:
                self._dropped += len(finished)
        if took and self._failing:
            self._failing = False
            self._log.event.info("traces_sent_again", **self.stats())
        elif not took:
            self._failing = True
            self._warn("traces_not_taken", **self.stats())

    def _warn(self, name: str, **fields: object) -> None:
        if (now := time.monotonic()) >= self._told_at + _TELL_EVERY_S:
            self._told_at = now
            self._log.event.warning(name, **fields)
