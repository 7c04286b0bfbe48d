"""`kill -9` of the router, again and again, under load by the client library: its callers see latency and no error."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from demonstrations import load
from demonstrations.finding import Finding, above, equal, told
from gpupool.client import AsyncClient, Client, GpuPoolError
from support.running import RunningPool, until

_THREADS: Final = 4
_TASKS: Final = 8
_EVERY_S: Final = 2.0


class Callers:
    """Threads on a blocking client and tasks on an asyncio one, all asking one request after the other."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._ending = threading.Event()
        self.errors: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.wrong = 0
        self._threads = [threading.Thread(target=self._block, args=(n,), daemon=True) for n in range(_THREADS)]
        self._threads.append(threading.Thread(target=lambda: asyncio.run(self._tasks()), daemon=True))

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish what is asked."""
        self._ending.set()
        for thread in self._threads:
            thread.join(40.0)
            assert not thread.is_alive(), "a caller never came back"

    def wait_for(self, calls: int) -> None:
        """Wait until that many more calls have come back."""
        goal = len(self.latencies) + calls
        for _ in until(30.0):
            if len(self.latencies) >= goal:
                return
        raise AssertionError(f"{len(self.latencies)} of {goal} calls within 30 s; errors: {self.errors}")

    def _note(self, n: int, result: object, began: float) -> None:
        self.latencies.append(time.monotonic() - began)
        self.wrong += not (isinstance(result, dict) and result["n"] == n)

    def _block(self, number: int) -> None:
        with Client(self._endpoint) as client:
            n = number << 32
            while not self._ending.is_set():
                n += 1
                began = time.monotonic()
                try:
                    self._note(n, client.infer({"n": n}).result, began)
                except GpuPoolError as e:
                    self.errors[f"{type(e).__name__}: {e}"] += 1

    async def _tasks(self) -> None:
        async with AsyncClient(self._endpoint) as client:
            await asyncio.gather(*(self._task(client, number) for number in range(_TASKS)))

    async def _task(self, client: AsyncClient, number: int) -> None:
        n = 1 << 60 | number << 32
        while not self._ending.is_set():
            n += 1
            began = time.monotonic()
            try:
                self._note(n, (await client.infer({"n": n})).result, began)
            except GpuPoolError as e:
                self.errors[f"{type(e).__name__}: {e}"] += 1


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Kill the router every two seconds."""
    with RunningPool(folder, "paced_model:Paced", options="fixed_s = 0.005") as pool:
        pool.start()
        callers = Callers(load.endpoint(pool))
        callers.start()
        kills = max(2, int(seconds / _EVERY_S))
        for number in range(kills):
            callers.wait_for(100)  # under load each time
            router = pool.wait(lambda s: s["router"]["state"] == "ready" and s["router"]["pid"])["router"]
            os.kill(router["pid"], signal.SIGKILL)
            _wait_for_restart(pool, number + 1)
            time.sleep(_EVERY_S / 2)
        callers.wait_for(100)
        callers.stop()
        return [
            equal("routers killed", len(pool.records("router_exited")), kills),
            above("calls", len(callers.latencies), 100 * kills, ""),
            equal("errors at the callers", dict(callers.errors), {}),
            equal("results of somebody else's request", callers.wrong, 0),
            equal("workers that died with it", len(pool.records("worker_exited")), 0),
            told(
                "median and slowest call",
                f"{1000 * load.percentile(callers.latencies, 0.5):.0f} ms, {max(callers.latencies):.2f} s",
            ),
        ]


def _wait_for_restart(pool: RunningPool, restarts: int) -> None:
    pool.wait(lambda s: s["router"]["restarts"] >= restarts and s["router"]["state"] == "ready")
