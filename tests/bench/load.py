"""A load generator in a process of its own: raw pyzmq, a fixed number of requests open at any time over so many connections, each latency kept.

Started as `python -m tests.bench.load`, reads its job from stdin and prints its result, both as JSON. The gpupool client is left out
on purpose: what it costs is measured apart.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from .many_clients import ManyClients

#: Nothing for so long means that requests were lost.
_SILENCE_MS: Final = 20_000


def run(
    endpoint: str, bodies: Sequence[bytes], concurrency: int, seconds: float, warm_up: float, connections: int = 1
) -> dict[str, Any]:
    """Keep `concurrency` requests open for `seconds`, after `warm_up` seconds that do not count; returns rate and latencies."""
    clients = ManyClients(endpoint, connections)
    sent: dict[int, float] = {}
    latencies: list[float] = []
    codes: dict[str, int] = {}
    number = 0
    for at in range(connections):  # all connections are up before the clock runs
        clients.send(at, [msgpack.packb({"v": 1, "id": "up"}), bodies[0]])
    for _ in range(connections):
        if clients.receive(_SILENCE_MS) is None:
            raise SystemExit(f"{connections} connections were not all served")
    began = time.perf_counter()
    measured_from, until = began + warm_up, began + warm_up + seconds
    cpu_from = 0.0

    def send(connection: int, now: float) -> None:
        nonlocal number
        number += 1
        sent[number] = now
        clients.send(connection, [msgpack.packb({"v": 1, "id": str(number)}), bodies[number % len(bodies)]])

    for at in range(concurrency):
        send(at % connections, time.perf_counter())
    while sent:
        message = clients.receive(_SILENCE_MS)
        if message is None:
            raise SystemExit(f"{len(sent)} of {number} requests were not answered")
        connection, (head, *_) = message
        now = time.perf_counter()
        header = msgpack.unpackb(head)
        started = sent.pop(int(header["id"]))
        if measured_from <= now <= until:
            cpu_from = cpu_from or time.process_time()
            latencies.append(now - started)
            codes[header["code"]] = codes.get(header["code"], 0) + 1
        if now < until:
            # Not the same one again: with fewer requests open than connections all of them are to be used.
            send((connection + concurrency) % connections, now)
    cpu_s = time.process_time() - cpu_from
    clients.close()
    if not latencies:
        raise SystemExit(f"not one reply within {seconds:g} s")
    latencies.sort()
    return {
        "answered": number + connections,
        "per_s": len(latencies) / seconds,
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[len(latencies) * 99 // 100],
        "failed": sum(count for code, count in codes.items() if code != "ok"),
        "client_cores": cpu_s / seconds,
    }


if __name__ == "__main__":
    job = json.load(sys.stdin)
    job["bodies"] = [bytes.fromhex(body) for body in job["bodies"]]
    print(json.dumps(run(**job)))
