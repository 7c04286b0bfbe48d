"""The router by number of workers and of clients, beside libzmq's proxy of the same shape in the same round."""

from __future__ import annotations

from statistics import median
from typing import Final

import msgpack

from gpupool.temporary_pool import TemporaryPool

from .measure import Result, cpu_seconds, echo_config, listener, load, mid, processes_of
from .peers import proxied

WORKERS: Final = (1, 4, 16)
CLIENTS: Final = (1, 100, 1000)
#: Requests open in all: the same for every shape, and one for each client.
_OPEN: Final = 64


def matrix(seconds: float, rounds: int) -> int:
    """Measure every shape; return how many requests failed."""
    body = msgpack.packb({"x": bytes(1000)})
    print("## Router, echo 1 KiB, by workers and clients\n")
    print(
        "| workers | clients | open in all | gpupool /s | zmq.proxy /s | ratio | gpupool p50/p99 ms | proxy p50/p99 ms | CPU us a request: router, proxy |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    failed = 0
    for workers in WORKERS:
        with TemporaryPool(echo_config(workers)) as pool, proxied(workers) as proxy:
            pool.wait_ready(lambda _: None)
            processes, middle = processes_of(pool), listener(proxy)
            for clients in CLIENTS:
                for concurrency in dict.fromkeys((_OPEN, clients)) if clients > 1 else (1, _OPEN):
                    ours: list[Result] = []
                    theirs: list[Result] = []
                    for _ in range(rounds):
                        before = cpu_seconds(processes)["router"]
                        ours.append(load(pool.endpoint, [body], concurrency, seconds, connections=clients))
                        ours[-1]["cpu_us"] = 1e6 * (cpu_seconds(processes)["router"] - before) / ours[-1]["answered"]
                        spent = sum(middle.cpu_times()[:2])
                        theirs.append(load(proxy, [body], concurrency, seconds, connections=clients))
                        theirs[-1]["cpu_us"] = 1e6 * (sum(middle.cpu_times()[:2]) - spent) / theirs[-1]["answered"]
                    ratio = median(a["per_s"] / b["per_s"] for a, b in zip(ours, theirs, strict=True))
                    print(
                        f"| {workers} | {clients:,} | {concurrency:,} | {mid(ours, 'per_s'):,.0f} | {mid(theirs, 'per_s'):,.0f} | {ratio:.2f} "
                        f"| {mid(ours, 'p50_ms'):.2f} / {mid(ours, 'p99_ms'):.2f} | {mid(theirs, 'p50_ms'):.2f} / {mid(theirs, 'p99_ms'):.2f} "
                        f"| {mid(ours, 'cpu_us'):.0f}, {mid(theirs, 'cpu_us'):.0f} |",
                        flush=True,
                    )
                    failed += sum(result["failed"] for result in ours + theirs)
            pool.stop()
    print()
    return failed
