"""The Python client against a real pool: what it gives up is not run, what is slow is sent again, what is cut comes back whole."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gpupool.client import AsyncClient, Cancelled, Client, GpuPoolError
from support.running import RunningPool

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]

#: One sample at a time, so that all but one wait.
ONE_BY_ONE = "[batching]\nmax_batch = 1\nmin_batch = 1\n"


def executed(pool: RunningPool) -> set[int]:
    """The samples that the handler was given."""
    return {i for note in pool.notes() for i in note["ids"]}


def idle(pool: RunningPool) -> None:
    """Wait until the pool has nothing in hand."""
    pool.wait(lambda s: s["router"]["pending"] == s["router"]["in_flight"] == 0 and not any(w["running"] for w in s["workers"]))


def test_cancelled_tasks_are_never_run_and_the_others_are(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", workers=1, config=ONE_BY_ONE).start()

    async def main() -> None:
        async with AsyncClient(f"tcp://127.0.0.1:{pool.port}") as client:
            tasks = [asyncio.create_task(client.infer({"i": n, "sleep": 3.0 if n == 0 else 0})) for n in range(40)]
            await asyncio.to_thread(pool.wait, lambda s: s["router"]["accepted_total"] == 40 and executed(pool) == {0})
            for task in tasks[1:30]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(r, asyncio.CancelledError) for r in done] == [0 < n < 30 for n in range(40)]

    asyncio.run(main())
    idle(pool)
    assert executed(pool) == {0, *range(30, 40)}
    replied = pool.status()["router"]["replied_total"]
    assert (replied["ok"], replied["cancelled"]) == (11, 29)


def test_what_is_open_when_a_client_closes_is_never_run(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", workers=1, config=ONE_BY_ONE).start()
    endpoint = f"tcp://127.0.0.1:{pool.port}"

    async def leave_tasks() -> None:
        client = AsyncClient(endpoint)
        tasks = [asyncio.create_task(client.infer({"i": n, "sleep": 3.0 if n == 0 else 0})) for n in range(20)]
        await asyncio.to_thread(pool.wait, lambda s: s["router"]["accepted_total"] == 20 and executed(pool) == {0})
        await client.close()
        assert all(isinstance(r, Cancelled) for r in await asyncio.gather(*tasks, return_exceptions=True))

    asyncio.run(leave_tasks())

    client = Client(endpoint)
    replies = client.map(({"i": n, "sleep": 3.0 if n == 101 else 0} for n in range(100, 120)), concurrency=20)
    assert next(replies).result["i"] == 100
    pool.wait(lambda _: 101 in executed(pool))
    client.close()
    pool.wait(lambda s: s["router"]["pending"] == 0)
    idle(pool)
    assert executed(pool) == {0, 100, 101}


def test_hedging_cuts_the_tail(make_pool: MakePool) -> None:
    """Two workers; a stall belongs to the execution and not to the sample, as a fault of a card or a collection of garbage does."""
    pool = make_pool("SlowFirst").start()

    def slowest(start: int, hedge_after: float | None) -> list[float]:
        times = []
        with Client(f"tcp://127.0.0.1:{pool.port}", hedge_after=hedge_after) as client:
            for n in range(start, start + 100):
                stalls = n % 40 == 20
                if stalls:
                    idle(pool)
                began = time.monotonic()
                assert client.infer({"i": n, "sleep": 1.0 if stalls else 0}).result["i"] == n
                times.append(time.monotonic() - began)
        return sorted(times)

    plain, hedged = slowest(0, None), slowest(1000, 0.1)
    idle(pool)
    assert hedged[98] < plain[98] / 2  # the 99th percentile
    runs = [i for note in pool.notes() for i in note["ids"]]
    assert len(runs) <= 200 + 5 + 5  # five per cent, and the burst
    router = pool.status()["router"]
    assert router["accepted_total"] == sum(router["replied_total"].values())


def test_stream_brings_every_result_in_order_while_a_worker_dies(make_pool: MakePool) -> None:
    pool = make_pool("Trouble", config="[batching]\nmax_batch = 8\n").start()
    endpoint = f"tcp://127.0.0.1:{pool.port}"

    def samples() -> Iterator[dict[str, object]]:
        for n in range(2000):
            if n == 1000:
                os.kill(pool.worker(0)["pid"], signal.SIGKILL)
            yield {"i": n}

    with Client(endpoint) as client:
        assert [r["i"] for r in client.stream(samples(), chunk=50)] == list(range(2000))

    async def numbers() -> AsyncIterator[dict[str, object]]:
        for n in range(500):
            yield {"i": n, "do": "raise" if n == 250 else ""}

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            got = [r async for r in client.stream(numbers(), chunk=50, return_exceptions=True)]
            assert [r["i"] for r in got if not isinstance(r, GpuPoolError)] == [*range(250), *range(300, 500)]
            assert {r.code for r in got[250:300]} == {"model_error"}

    asyncio.run(main())
