"""What all parts of the benchmark need: a pool that echoes, a load on it, and what its processes spent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from gpupool.temporary_pool import Place, TemporaryPool

Result = dict[str, Any]


def load(
    endpoint: str, bodies: Sequence[bytes], concurrency: int, seconds: float, *, warm_up: float = 0.3, connections: int = 1
) -> Result:
    """One cell, by a generator in a process of its own."""
    job = {
        "endpoint": endpoint,
        "bodies": [b.hex() for b in bodies],
        "concurrency": concurrency,
        "seconds": seconds,
        "warm_up": warm_up,
        "connections": connections,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.load"], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"load generator: {done.stderr}")
    result: Result = json.loads(done.stdout)
    return result


def processes_of(pool: TemporaryPool) -> dict[psutil.Process, str]:
    """The pool's processes with what each is."""
    document = pool.status()
    names = {document["pool"]["pid"]: "supervisor", document["router"]["pid"]: "router"}
    names |= {w["pid"]: f"worker {w['worker']}" for w in document["workers"]}
    return {psutil.Process(pid): name for pid, name in names.items()}


def cpu_seconds(processes: dict[psutil.Process, str]) -> dict[str, float]:
    """CPU time spent so far by role; the workers' together."""
    spent: dict[str, float] = {}
    for process, name in processes.items():
        role = "workers" if name.startswith("worker") else name
        spent[role] = spent.get(role, 0.0) + sum(process.cpu_times()[:2])
    return spent


def listener(endpoint: str) -> psutil.Process:
    """The child of ours that listens there."""
    port = int(endpoint.rpartition(":")[2])
    for child in psutil.Process().children():
        if any(c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in child.net_connections("tcp")):
            return child
    raise SystemExit(f"nobody listens on {endpoint}")


def mid(results: Sequence[Result], key: str) -> float:
    """The median of the rounds."""
    return float(median(r[key] for r in results))


def echo_config(workers: int = 2) -> Callable[[Place], str]:
    """So many CPU workers with the echo model, and defaults everywhere else."""

    def config(place: Place) -> str:
        handlers = Path(__file__).with_name("handlers.py")
        (Path(place.log_file).parent / "bench_handlers.py").write_text(handlers.read_text())
        return f"""
[pool]
runtime_dir = {json.dumps(place.runtime_dir)}
devices = "cpu:{workers}"
[router]
bind = [{json.dumps(place.endpoint)}]
[http]
bind = ""
[logs]
file = {json.dumps(place.log_file)}
[[model]]
name = "echo"
handler = "bench_handlers:Echo"
"""

    return config
