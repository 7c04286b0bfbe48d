"""Twenty times what the pool can do, with bodies of 200 kB from 20 clients: goodput stays, refusals are quick, memory is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from demonstrations import load
from demonstrations.finding import Finding, above, below, equal, told
from demonstrations.load import Job, Seen
from support.running import RunningPool

TIMES: Final = 20
CLIENTS: Final = 20
BODY_BYTES: Final = 200_000
_PROCESSES: Final = 2
_MAX_PENDING_BYTES: Final = 32 << 20
_MIB: Final = 1 << 20
#: Two workers that take 0.1 s for each request: 20/s, time-bound, so that the load's own CPU does not lower it.
CONFIG: Final = (
    f"[batching]\nmax_batch = 1\nmin_batch = 1\n[router]\nmax_pending = 1000\nmax_pending_bytes = {_MAX_PENDING_BYTES}\n"
)


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Measure the capacity, then flood, then ask once more."""
    with RunningPool(folder, "paced_model:Paced", options="fixed_s = 0.1", config=CONFIG) as pool:
        pool.start()
        calm_s = max(4.0, seconds / 4)
        calm = load.run(Job(load.endpoint(pool), calm_s, connections=4, open=8, body_bytes=BODY_BYTES))
        capacity = calm.ok_per_s(1.0, calm_s)
        control = Control(pool)
        control.start()
        rate = TIMES * capacity / _PROCESSES
        job = Job(
            load.endpoint(pool), seconds, connections=CLIENTS // _PROCESSES, rate=rate, body_bytes=BODY_BYTES,
            timeouts_ms=(None, 5000), refuse_every=211,
        )  # fmt: skip
        began = time.monotonic()
        floods = [load.start(job) for _ in range(_PROCESSES)]
        time.sleep(max(0.0, began + seconds + 0.7 - time.monotonic()))  # what starting them took is not known better
        first_s, first_code = _first_request(pool)
        seen = Seen()
        for flood in floods:
            seen.merge(load.finish(flood))
        pool.wait(lambda s: not s["router"]["pending"] and not s["router"]["in_flight"])
        control.stop()
        goodput = seen.ok_per_s(1.0, seconds)
        codes = dict(seen.codes.most_common())
        refused = seen.latencies.get("overloaded", [])
        answered = sum(seen.codes.values())
        return [
            told("capacity, closed loop of 8", f"{capacity:.1f} requests/s"),
            told("offered", f"{seen.sent / seconds:.0f} requests/s, {seen.sent * BODY_BYTES / seconds / 1e6:.0f} MB/s"),
            above("goodput under the flood, of capacity", goodput / capacity, 0.95, "", timed=True),
            told("answers", codes),
            equal("sent = ok + rejected + expired", (answered, seen.unanswered, seen.strays), (seen.sent, 0, 0)),
            equal("other codes", sorted(set(codes) - {"ok", "overloaded", load.REFUSED_BY_MODEL, "deadline_exceeded"}), []),
            below("p99 until `overloaded`", 1000 * load.percentile(refused, 0.99), 100, "ms", timed=True),
            told(
                "median and longest until `overloaded`",
                f"{1000 * load.percentile(refused, 0.5):.1f} and {1000 * load.percentile(refused, 1.0):.0f} ms",
            ),
            below("first request after the flood, by a new client", first_s, 1.0, "s", timed=True),
            equal("its code", first_code, "ok"),
            below("most requests waiting in the router", control.pending, 1000, ""),
            below("growth of the router", control.growth("router"), _MAX_PENDING_BYTES / _MIB + 100, "MiB"),
            below("growth of the supervisor", control.growth("supervisor"), 100, "MiB"),
            equal("`status` every 0.1 s, unanswered", control.unanswered, 0),
            told("`status`, asked and slowest", f"{control.asked}, {1000 * control.slowest_s:.0f} ms"),
        ]


def _first_request(pool: RunningPool) -> tuple[float, str]:
    with pool.client() as client:
        began = time.monotonic()
        header, _ = client.call({"n": 1}, within=40.0)
        return time.monotonic() - began, header["code"]


class Control(threading.Thread):
    """An operator's hand on the pool while it is flooded: `status` ten times a second, and what memory the processes hold."""

    def __init__(self, pool: RunningPool) -> None:
        super().__init__(daemon=True)
        self._pool = pool
        self._ending = threading.Event()
        self.asked = self.unanswered = self.pending = 0
        self.slowest_s = 0.0
        self._rss: dict[str, list[float]] = {}

    def run(self) -> None:
        """Ask."""
        while not self._ending.wait(0.1):
            self.asked += 1
            began = time.monotonic()
            try:
                document = self._pool.status()
            except (OSError, ValueError, KeyError):
                self.unanswered += 1
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self._look(document)

    def _look(self, document: dict[str, Any]) -> None:
        self.pending = max(self.pending, document["router"]["pending"])
        for name, pid in (("router", document["router"]["pid"]), ("supervisor", document["pool"]["pid"])):
            with suppress(psutil.Error):
                self._rss.setdefault(name, []).append(psutil.Process(pid).memory_info().rss / _MIB)

    def growth(self, name: str) -> float:
        """MiB between the first look and the highest."""
        return max(self._rss[name]) - self._rss[name][0]

    def stop(self) -> None:
        """End it."""
        self._ending.set()
        self.join(10.0)
