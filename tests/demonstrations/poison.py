"""A request that kills its workers, among steady traffic: two deaths, one verdict, and nobody else notices."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from demonstrations.finding import Finding, above, equal, told
from support.running import Load, RunningPool

WORKERS: Final = 3
_RATE: Final = 100.0
_LOOK_S: Final = 0.02
CONFIG: Final = "[supervision]\nrestart_delays_s = [0.0]\n"


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Send the same deadly request twice: the second time it must be refused at the door."""
    with RunningPool(folder, "paced_model:Paced", workers=WORKERS, options="fixed_s = 0.01", config=CONFIG) as pool:
        pool.start()
        live: Counter[int] = Counter()
        ending = threading.Event()

        def look() -> None:
            while not ending.wait(_LOOK_S):
                live[pool.status()["pool"]["workers_ready"]] += 1

        looker = threading.Thread(target=look, daemon=True)
        load = Load(pool, rate=_RATE, sample={"n": 0})
        load.wait_for(int(_RATE * seconds / 3))
        looker.start()
        with pool.client() as client:
            first, _ = client.call({"do": "kill"}, within=30.0)
            again, _ = client.call({"do": "kill"}, within=30.0)
        load.wait_for(int(_RATE * seconds / 3), within=60.0)
        pool.wait(lambda s: s["pool"]["workers_ready"] == WORKERS)
        ending.set()
        looker.join(10.0)
        codes = load.stop()
        deaths = len(pool.records("worker_exited"))
        return [
            equal("deaths of workers", deaths, 2),
            equal("the deadly request was answered", first["code"], "poison"),
            equal("attempts for it", first["attempts"], 2),
            equal(
                "the same request again, attempts",
                (again["code"], again["attempts"] if "attempts" in again else 0),
                ("poison", 0),
            ),
            equal("everybody else was answered", dict(codes), {"ok": codes.total()}),
            above("fewest workers ready at any look", min(live), 1, "workers"),
            told("looks, by number of ready workers", dict(sorted(live.items()))),
            told("slowest of the others", f"{1000 * max(load.latencies):.0f} ms"),
        ]
