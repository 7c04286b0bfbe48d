"""Looks at a pool twice a second: do the books balance, do counters only grow, and what memory do supervisor and router hold.

Memory is judged by the last third of the samples beside the middle third, each by its median: what starting and the first load cost is in
the first third. The supervisor handles no bodies; the router holds what waits (bounded by `max_pending_bytes`) and what clients do not read
(bounded by the outbox), and the allocator keeps what was freed, so that its tolerance is a share of these bounds.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import psutil

from support.running import RunningPool

EVERY_S: Final = 0.5
#: Every so many samples come from the command line instead of the socket behind it.
_COMMAND_EVERY: Final = 10
#: Books are asked for with each status; older ones are the last that were to be had.
_FRESH_S: Final = 0.25
#: Growth between the middle and the last third that is taken for noise, and what each minute between their middles may add.
TOLERANCE_MIB: Final = {"supervisor": 2.0, "router": 24.0}
PER_MINUTE_MIB: Final = {"supervisor": 1.0, "router": 4.0}


@dataclass(frozen=True, slots=True)
class Memory:
    """RSS of one process through the soak, MiB."""

    first: float
    middle: float
    last: float
    peak: float
    allowed: float

    @property
    def flat(self) -> bool:
        """Whether it grew no more than the tolerance."""
        return self.last - self.middle <= self.allowed


class Watch(threading.Thread):
    """Samples until stopped. `problems` are broken promises."""

    def __init__(self, pool: RunningPool) -> None:
        super().__init__(daemon=True)
        self._pool = pool
        self._ending = threading.Event()
        self.samples = 0
        self.unanswered = 0
        self.stale = 0  # samples whose books may be old ones, or another router's
        self.slowest_s = 0.0
        self.live: Counter[int] = Counter()  # samples by number of ready workers
        self.restarts = 0
        self.problems: Counter[str] = Counter()
        self._rss: dict[str, list[tuple[float, float, int]]] = {"supervisor": [], "router": []}
        self._router: int | None = None
        self._before: dict[str, Any] = {}  # the books that the next ones are compared with

    def run(self) -> None:
        """Sample."""
        while not self._ending.wait(EVERY_S):
            began = time.monotonic()
            try:
                self._look(self._status())
            except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as e:
                self.unanswered += 1
                self.problems[f"status was not answered: {type(e).__name__}: {e}"] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def stop(self) -> None:
        """End it."""
        self._ending.set()
        self.join(60.0)

    def _status(self) -> dict[str, Any]:
        if self.samples % _COMMAND_EVERY:
            return self._pool.status()
        document: dict[str, Any] = json.loads(self._pool.cli("status", "--json").stdout)
        return document

    def _look(self, document: dict[str, Any]) -> None:
        self.samples += 1
        router = document["router"]
        self.live[document["pool"]["workers_ready"]] += 1
        self.problems += unbalanced(router)
        self.restarts = router["restarts"]
        if router["pid"] != self._router:
            self._router, self._before = router["pid"], {}
        if (router.get("books_age_s") or 0.0) > _FRESH_S:
            self.stale += 1
        else:
            self.problems += went_back(self._before, router)
            self._before = router
        for name, pid in (("supervisor", document["pool"]["pid"]), ("router", router["pid"])):
            with suppress(psutil.Error):
                if pid:
                    self._rss[name].append((time.monotonic(), psutil.Process(pid).memory_info().rss / 2**20, pid))

    def memory(self) -> dict[str, Memory]:
        """What was seen of each process since its last start, where that is enough to judge."""
        found = {}
        for name, seen in self._rss.items():
            mine = [(at, rss) for at, rss, pid in seen if pid == seen[-1][2]]
            third = len(mine) // 3
            if third < 3:
                continue
            parts = mine[:third], mine[third : 2 * third], mine[2 * third :]
            middles = [median(rss for _, rss in part) for part in parts]
            minutes = (parts[2][0][0] - parts[1][0][0]) / 60
            allowed = TOLERANCE_MIB[name] + PER_MINUTE_MIB[name] * minutes
            found[name] = Memory(middles[0], middles[1], middles[2], max(rss for _, rss in mine), allowed)
        return found


def unbalanced(router: dict[str, Any]) -> Counter[str]:
    """The books of one sample, if they do not balance."""
    accepted, replied = router["accepted_total"], sum(router["replied_total"].values())
    if accepted == replied + router["pending"] + router["in_flight"]:
        return Counter()
    return Counter(
        [f"books: accepted {accepted}, replied {replied}, pending {router['pending']}, in flight {router['in_flight']}"]
    )


def went_back(before: dict[str, Any], after: dict[str, Any]) -> Counter[str]:
    """Counters that are lower in the later sample of the same router."""
    found = []
    for name, value in before.items():
        if not name.endswith("_total"):
            continue
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        now = after.get(name, {} if isinstance(value, dict) else 0)
        for key, old in pairs:
            new = now.get(key, 0) if isinstance(now, dict) else now
            if isinstance(old, int) and new < old:
                found.append(f"{name} {key} went from {old} to {new}")
    return Counter(found)
