"""What goes wrong during a soak, in a seeded order: kills, freezes, restarts, drains and reloads; the router only where asked for.

The sequence of disturbances follows from the seed; which instant and which request each of them hits does not.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from support.running import RunningPool

#: Between one disturbance and the next; a worker is back within about half a second of its death.
_PAUSE_S: Final = (0.5, 2.0)
_POLICIES: Final = ("shortest_wait", "shortest_queue", "round_robin")


class Disturber(threading.Thread):
    """Does one thing after the other to a pool until it is stopped. `done` counts what was done, `problems` what did not work."""

    def __init__(self, pool: RunningPool, seed: int, *, router_kills: bool) -> None:
        super().__init__(daemon=True)
        self._pool = pool
        self._rng = random.Random(seed)
        self._ending = threading.Event()
        self._workers = len(pool.status()["workers"])
        self.done: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self._config = pool.file.read_text()
        self._table: list[tuple[str, int, Callable[[], None]]] = [
            ("SIGKILL to a worker", 30, lambda: self._signal(signal.SIGKILL)),
            ("SIGSEGV to a worker", 15, lambda: self._signal(signal.SIGSEGV)),
            ("freeze and thaw of a worker", 20, self._freeze),
            ("freeze of a worker for good", 5, lambda: self._signal(signal.SIGSTOP)),
            ("restart-worker", 15, lambda: self._verb("restart", workers=[self._slot()])),
            ("restart-worker --force", 5, lambda: self._verb("restart", workers=[self._slot()], force=True)),
            ("drain and resume of a worker", 15, self._drain),
            ("reload with other values", 15, self._reload),
            ("reload of a bad file", 5, self._bad_reload),
        ]
        if router_kills:
            self._table.append(("SIGKILL to the router", 15, self._kill_router))

    def run(self) -> None:
        """Disturb."""
        # Each at least once, in a shuffled order, then at random by weight: a short soak too has seen everything.
        first = self._rng.sample(self._table, len(self._table))
        while not self._ending.wait(self._rng.uniform(*_PAUSE_S)):
            if first:
                name, _, act = first.pop()
            else:
                name, _, act = self._rng.choices(self._table, [weight for _, weight, _ in self._table])[0]
            try:
                act()
                self.done[name] += 1
            except (OSError, ValueError, KeyError, AssertionError) as e:
                self.problems[f"{name}: {type(e).__name__}: {e}"] += 1

    def stop(self) -> None:
        """End it, and put right what it has left: nothing is drained, frozen or badly configured afterwards."""
        self._ending.set()
        self.join(30.0)
        self._pool.file.write_text(self._config)
        self._verb("reload")
        self._verb("resume", workers=[str(slot) for slot in range(self._workers)])

    def _slot(self) -> str:
        return str(self._rng.randrange(self._workers))

    def _signal(self, number: signal.Signals) -> None:
        pid = self._pool.worker(int(self._slot()))["pid"]
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _freeze(self) -> None:
        pid = self._pool.worker(int(self._slot()))["pid"]
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._rng.uniform(0.1, 1.5))
                os.kill(pid, signal.SIGCONT)

    def _kill_router(self) -> None:
        if pid := self._pool.status()["router"]["pid"]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _verb(self, verb: str, **arguments: object) -> None:
        answer = self._pool.ask(verb, **arguments)
        if not answer["ok"]:
            raise ValueError(answer["error"]["message"])

    def _drain(self) -> None:
        slot = self._slot()
        self._verb("drain", workers=[slot])
        time.sleep(self._rng.uniform(0.1, 1.0))
        self._verb("resume", workers=[slot])

    def _reload(self) -> None:
        policy = self._rng.choice(_POLICIES)
        batch = self._rng.choice([4, 8, 16])
        text = self._config.replace('policy = "shortest_wait"', f'policy = "{policy}"').replace(
            "max_batch = 16", f"max_batch = {batch}"
        )
        self._pool.file.write_text(text)
        self._verb("reload")

    def _bad_reload(self) -> None:
        self._pool.file.write_text(self._config + "\n[nonsense]\n")
        answer = self._pool.ask("reload")
        self._pool.file.write_text(self._config)
        assert not answer["ok"], "a bad configuration was taken"
