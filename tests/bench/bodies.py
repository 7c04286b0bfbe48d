"""Large bodies: how fast they go through, what they cost the router in CPU and memory, beside libzmq's proxy in the same round.

Counted from the code, a body of this size is copied in the router's own memory once on its way in and once on its way out: libzmq reads it
from the socket into a message, `drain` makes bytes of it, and from there it is sent as it is. The kernel's copies, one into each socket
buffer and one out of it, come on top, and are all that the proxy has. The measured CPU per MB, beside the proxy's, tells the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Final

import msgpack
import psutil

from gpupool.temporary_pool import TemporaryPool

from .measure import Result, cpu_seconds, echo_config, listener, load, mid, processes_of
from .peers import proxied

_MB: Final = 1_000_000
_BODY_BYTES: Final = 10 * _MB
_OPEN: Final = (1, 4, 16)
#: Of the default configuration: what may wait in the router, and behind it for clients that do not read.
_MAX_PENDING_MIB: Final = 256


def bodies(seconds: float, rounds: int) -> int:
    """Echo 10 MB there and back; return how many requests failed."""
    body = msgpack.packb({"x": bytes(_BODY_BYTES)})
    print(f"## Bodies of 10 MB, there and back, 2 workers; {_MAX_PENDING_MIB} MiB may wait in the router\n")
    print(
        "| open | gpupool MB/s each way | zmq.proxy MB/s | ratio | CPU us a MB each way: router, proxy, workers | router RSS MiB: before, peak |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    failed = 0
    with TemporaryPool(echo_config(2)) as pool, proxied(2) as proxy:
        pool.wait_ready(lambda _: None)
        processes = processes_of(pool)
        router = next(process for process, name in processes.items() if name == "router")
        middle = listener(proxy)
        for concurrency in _OPEN:
            ours: list[Result] = []
            theirs: list[Result] = []
            before_mib = router.memory_info().rss / 2**20
            with peak(router) as seen:
                for _ in range(rounds):
                    before = cpu_seconds(processes)
                    ours.append(load(pool.endpoint, [body], concurrency, seconds))
                    moved = 2 * ours[-1]["answered"] * _BODY_BYTES / _MB
                    after = cpu_seconds(processes)
                    ours[-1] |= {role: 1e6 * (after[role] - before[role]) / moved for role in ("router", "workers")}
                    spent = sum(middle.cpu_times()[:2])
                    theirs.append(load(proxy, [body], concurrency, seconds))
                    moved = 2 * theirs[-1]["answered"] * _BODY_BYTES / _MB
                    theirs[-1]["proxy"] = 1e6 * (sum(middle.cpu_times()[:2]) - spent) / moved
            ratio = median(a["per_s"] / b["per_s"] for a, b in zip(ours, theirs, strict=True))
            print(
                f"| {concurrency} | {10 * mid(ours, 'per_s'):,.0f} | {10 * mid(theirs, 'per_s'):,.0f} | {ratio:.2f} "
                f"| {mid(ours, 'router'):.0f}, {mid(theirs, 'proxy'):.0f}, {mid(ours, 'workers'):.0f} | {before_mib:.0f}, {max(seen):.0f} |",
                flush=True,
            )
            failed += sum(result["failed"] for result in ours + theirs)
        pool.stop()
    print()
    return failed


@contextmanager
def peak(process: psutil.Process, every_s: float = 0.01) -> Iterator[list[float]]:
    """Sample a process's RSS, MiB, as long as the context lasts."""
    seen, ending = [process.memory_info().rss / 2**20], threading.Event()

    def sample() -> None:
        while not ending.wait(every_s):
            with suppress(psutil.Error):
                seen.append(process.memory_info().rss / 2**20)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ending.set()
        thread.join()
