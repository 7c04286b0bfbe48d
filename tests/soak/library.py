"""The soak's clients that use the Python library, blocking and asyncio; started as the raw ones are, by soak.clients."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gpupool.client import AsyncClient, Client, GpuPoolError, Reply
from soak.ledger import ALWAYS, PATIENT_S, Ledger

if TYPE_CHECKING:
    from soak.clients import Job

_TASKS: Final = 8
_THREADS: Final = 2
#: What callers are held to where nobody floods: errors that pass are the library's business. `poison`: two unrelated kills hit one request.
_MAY_STRICTLY: Final = frozenset({"ok", "poison"})


class Sorts:
    """Makes requests for the library and checks what came of them."""

    def __init__(self, job: Job, offset: int) -> None:
        self.rng = random.Random(job.seed * 100 + offset)
        self.ledger = Ledger(job.kind)
        self._strict = job.strict
        self._n = job.seed * 10_000_000 + offset * 1_000_000

    def make(self) -> tuple[Any, dict[str, Any]]:
        """A sample, or several, with the options of `infer`."""
        rng, options = self.rng, {"timeout": PATIENT_S, "priority": self.rng.randrange(10)}
        rows = rng.randrange(1, 10) if rng.random() < 0.15 else 0
        samples = []
        for _ in range(rows or 1):
            self._n += 1
            samples.append({"n": self._n, "b": rng.randbytes(rng.randrange(1000)), "sleep": rng.choice([0.0, 0.0, 0.01])})
        if rows:
            options["many"] = True
        elif rng.random() < 0.1:
            options["retry"] = False
        elif rng.random() < 0.1:
            options["timeout"] = 0.05
        self.ledger.sent += 1
        return (samples if rows else samples[0]), options

    def check(self, sent: Any, options: dict[str, Any], outcome: Reply | GpuPoolError, began: float) -> None:
        """Enter an outcome in the ledger."""
        ledger, code = self.ledger, str(outcome.code)
        ledger.reply(code, time.monotonic() - began)
        may = _MAY_STRICTLY if self._strict else ALWAYS
        if options["timeout"] < 1.0:
            may |= {"deadline_exceeded", "overloaded", "no_workers"}  # no time to try again
        if not options.get("retry", True):
            may |= {"worker_lost"}
        if code not in may:
            ledger.violation(f"a request by the library ended {code}: {outcome}")
        if isinstance(outcome, Reply):
            samples, results = (sent, outcome.result) if options.get("many") else ([sent], [outcome.result])
            right = [{"n": s["n"], "crc": zlib.crc32(s["b"])} for s in samples]
            if [{"n": r["n"], "crc": r["crc"]} for r in results] != right:
                ledger.violation(f"contents of another: {str(results)[:80]}")


def blocking(job: Job) -> Ledger:
    """The blocking client, used from several threads."""
    all_sorts = [Sorts(job, offset) for offset in range(_THREADS)]
    until = time.monotonic() + job.seconds
    with Client(job.endpoint) as client:

        def run(sorts: Sorts) -> None:
            while time.monotonic() < until:
                sample, options = sorts.make()
                began = time.monotonic()
                try:
                    outcome: Reply | GpuPoolError = client.infer(sample, **options)
                except GpuPoolError as e:
                    outcome = e
                sorts.check(sample, options, outcome, began)

        threads = [threading.Thread(target=run, args=(sorts,)) for sorts in all_sorts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return _together(all_sorts)


def asynchronous(job: Job) -> Ledger:
    """The asyncio client with several tasks, some of which are cancelled while they wait."""
    all_sorts = [Sorts(job, offset) for offset in range(_TASKS)]

    async def run(client: AsyncClient, sorts: Sorts, until: float) -> None:
        while time.monotonic() < until:
            sample, options = sorts.make()
            began = time.monotonic()
            call = asyncio.ensure_future(client.infer(sample, **options))
            if sorts.rng.random() < 0.05:
                await asyncio.sleep(sorts.rng.random() / 20)
                call.cancel()
            try:
                outcome: Reply | GpuPoolError = await call
            except GpuPoolError as e:
                outcome = e
            except asyncio.CancelledError:
                sorts.ledger.reply("cancelled", 0.0)
                continue
            sorts.check(sample, options, outcome, began)

    async def main() -> None:
        async with AsyncClient(job.endpoint) as client:
            until = time.monotonic() + job.seconds
            await asyncio.gather(*(run(client, sorts, until) for sorts in all_sorts))

    asyncio.run(main())
    return _together(all_sorts)


def _together(all_sorts: list[Sorts]) -> Ledger:
    ledger = all_sorts[0].ledger
    for sorts in all_sorts[1:]:
        ledger.merge(sorts.ledger)
    if ledger.sent != ledger.codes.total():
        ledger.violation(f"{ledger.sent} requests by the library had {ledger.codes.total()} ends")
    return ledger


KINDS: Final[dict[str, Callable[[Job], Ledger]]] = {"client": blocking, "async": asynchronous}
