"""`python -m tests.bench`: what gpupool costs and gains, as ratios to something simple measured in the same minutes.

Absolute rates say more about the machine than about the program, so each comparison alternates between its contestants, round by
round, and the median of the rounds' ratios is what counts. Prints Markdown; exit code 1 when any request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Final

import msgpack
from psutil import NoSuchProcess

from gpupool.client import Client
from gpupool.demo import demo_config, devices_for, read_paragraphs
from gpupool.temporary_pool import TemporaryPool

from .batcher_cost import batcher_cost
from .bodies import bodies
from .core_cost import core_cost
from .measure import Result, cpu_seconds, echo_config, load, mid, processes_of
from .peers import direct, plain_loops, proxied
from .router_matrix import matrix
from .seeing import seeing
from .story import story
from .worker_cost import worker_cost

CONCURRENCIES: Final = (1, 16, 64, 256)
PARTS: Final = ("echo", "idle", "client", "minilm", "matrix", "bodies", "core", "worker", "scrape", "story", "seeing")


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--quick", action="store_true", help="1 s a cell and one round: whether it works, not how fast")
    parser.add_argument("--seconds", type=float, help="per cell (5)")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (3)")
    options = parser.parse_args()
    seconds = options.seconds or (1.0 if options.quick else 5.0)
    rounds = options.rounds or (1 if options.quick else 3)
    parts = options.parts or PARTS
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the start; {rounds} rounds of {seconds:g} s\n")
    failed = 0
    if {"echo", "idle", "client"} & set(parts):
        with TemporaryPool(echo_config()) as pool:
            pool.wait_ready(lambda _: None)
            if "echo" in parts:
                failed += echo(pool, seconds, rounds)
            if "client" in parts:
                client(pool.endpoint, seconds)
            if "idle" in parts:
                idle(pool, seconds)
            pool.stop()
    if "minilm" in parts:
        failed += minilm(seconds, rounds)
    if "matrix" in parts:
        failed += matrix(seconds, rounds)
    if "bodies" in parts:
        failed += bodies(seconds, rounds)
    if "core" in parts:
        core_cost(quick=options.quick)
        batcher_cost(quick=options.quick)
    if "worker" in parts:
        worker_cost(seconds)
    if "scrape" in parts:
        from .scrape_cost import scrape_cost  # needs tests/ on the path, which the other parts do not

        scrape_cost(quick=options.quick)
    if "story" in parts:
        failed += story(max(seconds, 3.0), rounds)
    if "seeing" in parts:
        failed += seeing(seconds, rounds)
    if failed:
        print(f"{failed} requests failed", file=sys.stderr)
    return 1 if failed else 0


def echo(pool: TemporaryPool, seconds: float, rounds: int) -> int:
    """1 KiB there and back through two workers, beside libzmq's proxy and beside no middle at all."""
    body = msgpack.packb({"x": bytes(1000)})
    results: dict[tuple[str, int], list[Result]] = {}
    processes = processes_of(pool)
    with proxied() as proxy, direct() as alone:
        for _ in range(rounds):
            for concurrency in CONCURRENCIES:
                for name, target in (("gpupool", pool.endpoint), ("proxy", proxy), ("direct", alone)):
                    before = cpu_seconds(processes)
                    result = load(target, [body], concurrency, seconds)
                    used = {role: spent - before[role] for role, spent in cpu_seconds(processes).items()}
                    result["cpu_us"] = {role: 1e6 * spent / result["answered"] for role, spent in used.items()}
                    results.setdefault((name, concurrency), []).append(result)
    print("## Echo, 1 KiB, 2 workers\n")
    print(
        "| open requests | gpupool /s | zmq.proxy /s | ratio | gpupool p50/p99 ms | proxy p50/p99 ms "
        "| p50 added to direct, us | CPU us a request: router, workers, supervisor |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for concurrency in CONCURRENCIES:
        ours, proxy_, direct_ = (results[name, concurrency] for name in ("gpupool", "proxy", "direct"))
        ratio = median(a["per_s"] / b["per_s"] for a, b in zip(ours, proxy_, strict=True))
        cpu = [f"{median(r['cpu_us'][role] for r in ours):.0f}" for role in ("router", "workers", "supervisor")]
        added = median(1000 * (a["p50_ms"] - b["p50_ms"]) for a, b in zip(ours, direct_, strict=True))
        print(
            f"| {concurrency} | {mid(ours, 'per_s'):,.0f} | {mid(proxy_, 'per_s'):,.0f} | {ratio:.2f} "
            f"| {mid(ours, 'p50_ms'):.2f} / {mid(ours, 'p99_ms'):.2f} | {mid(proxy_, 'p50_ms'):.2f} / {mid(proxy_, 'p99_ms'):.2f} "
            f"| {added:,.0f} "
            f"| {', '.join(cpu)} |"
        )
    print()
    return sum(r["failed"] for rs in results.values() for r in rs)


def client(endpoint: str, seconds: float) -> None:
    """The Python client instead of a bare socket."""
    sample = {"x": bytes(1000)}
    print("## Python client, echo 1 KiB\n")
    print("| | requests /s | own CPU, us per request |\n| --- | ---: | ---: |")
    with Client(endpoint) as c:
        for name, concurrency in (("infer, one at a time", 1), ("map, 64 open", 64)):
            for _ in c.map((sample for _ in range(200)), concurrency=concurrency):
                pass
            done, cpu, began = 0, time.process_time(), time.perf_counter()
            until = began + seconds
            if concurrency == 1:
                while time.perf_counter() < until:
                    c.infer(sample)
                    done += 1
            else:
                for _ in c.map(_until(sample, until), concurrency=concurrency):
                    done += 1
            took = time.perf_counter() - began
            print(f"| {name} | {done / took:,.0f} | {1e6 * (time.process_time() - cpu) / done:.0f} |")
    print()


def _until(sample: object, until: float) -> Iterator[object]:
    while time.perf_counter() < until:
        yield sample


def idle(pool: TemporaryPool, seconds: float) -> None:
    """What each process holds and burns while nothing is asked of it."""
    processes = processes_of(pool)
    time.sleep(1.0)  # let it settle
    before = {p: sum(p.cpu_times()[:2]) for p in processes}
    time.sleep(seconds)
    print("## Idle, after the load\n\n| process | CPU % | RSS MiB | own memory MiB |\n| --- | ---: | ---: | ---: |")
    for process, name in processes.items():
        with contextlib.suppress(NoSuchProcess):
            used = 100 * (sum(process.cpu_times()[:2]) - before[process]) / seconds
            memory = process.memory_full_info()
            print(f"| {name} | {used:.1f} | {memory.rss / 2**20:.0f} | {memory.uss / 2**20:.0f} |")
    print()


def minilm(seconds: float, rounds: int) -> int:
    """A real model through the pool at 64 open requests, beside the same model in bare loops of 32."""
    devices = devices_for(None)
    seconds = max(seconds, 3.0)  # batches take some tenths of a second on CPUs
    texts = [msgpack.packb({"text": text}) for text in read_paragraphs(None)]
    on_gpu = devices == '"auto"'
    ours: list[Result] = []
    loops: list[float] = []
    for _ in range(rounds):  # one after the other: a loaded pool that merely waits would still share the caches
        with TemporaryPool(lambda place: demo_config(place, devices)) as pool:
            workers = len(pool.wait_ready(lambda _: None)["workers"])
            ours.append(load(pool.endpoint, texts, 64, seconds, warm_up=2.0))
            pool.stop()
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        loops.append(plain_loops(workers, threads, 32, seconds, "cuda" if on_gpu else "cpu"))
    ratio = median(a["per_s"] / b for a, b in zip(ours, loops, strict=True))
    print(f"## MiniLM, {workers} workers on {'GPUs' if on_gpu else 'CPU'}\n")
    print("| pool, 64 open, texts /s | bare loops of 32, texts /s | ratio | pool p50/p99 ms |\n| ---: | ---: | ---: | ---: |")
    latency = f"{mid(ours, 'p50_ms'):.1f} / {mid(ours, 'p99_ms'):.1f}"
    print(f"| {mid(ours, 'per_s'):.0f} | {median(loops):.0f} | {ratio:.2f} | {latency} |\n")
    return sum(r["failed"] for r in ours)


if __name__ == "__main__":
    sys.exit(main())
