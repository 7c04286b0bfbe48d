"""What seeing costs: CPU of router and workers, log bytes and losses per request, by log level and by the share of requests traced.

One load on one pool after the other, round by round, so that what the machine does meanwhile is shared out. Spans go to a collector in
this process that takes them unread. The core alone, without sockets and without log, is measured beside.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Final

import msgpack

from gpupool.spec import TraceSpec
from gpupool.temporary_pool import Place, TemporaryPool
from gpupool.trace_headers import exporter_missing

from .core_cost import Bench
from .measure import Result, cpu_seconds, echo_config, load, processes_of

_OPEN: Final = 64


@dataclass(frozen=True, slots=True)
class View:
    """How much is seen."""

    level: str
    sample: float  # 0: no traces at all


VIEWS: Final = (View("warning", 0.0), View("info", 0.0), View("info", 0.01), View("info", 1.0))


def seeing(seconds: float, rounds: int) -> int:
    """Measure each view and print the table; return how many requests failed."""
    if missing := exporter_missing():
        print(f"## The cost of seeing\n\nNo {missing} here: pip install 'gpupool[traces]'. Not run.\n")
        return 0
    body = msgpack.packb({"x": bytes(1000)})
    results: dict[View, list[Result]] = {view: [] for view in VIEWS}
    with _collector() as endpoint:
        for _ in range(rounds):
            for view in VIEWS:
                results[view].append(_measure(view, endpoint, body, seconds))
    print(f"## The cost of seeing (echo, 1 KiB, 2 workers, {_OPEN} open requests)\n")
    print(
        "| log level | traced | requests /s | CPU us a request: router | workers | log bytes a request | spans: requests sent | dropped |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for view, cells in results.items():
        middle = {key: median(cell[key] for cell in cells) for key in ("per_s", "router_us", "workers_us", "log_bytes")}
        sent, dropped = (sum(cell["traces"][key] for cell in cells) for key in ("sent", "dropped"))
        traced = f"{view.sample:.0%}" if view.sample else "off"
        print(
            f"| {view.level} | {traced} | {middle['per_s']:,.0f} | {middle['router_us']:.1f} | {middle['workers_us']:.1f} "
            f"| {middle['log_bytes']:,.0f} | {sent:,} | {dropped:,} |"
        )
    print()
    _core_alone()
    return sum(cell["failed"] for cells in results.values() for cell in cells)


def _measure(view: View, endpoint: str, body: bytes, seconds: float) -> Result:
    config = echo_config()
    places: list[Place] = []

    def seen(place: Place) -> str:
        places.append(place)
        text = config(place).replace("[logs]\n", f'[logs]\nlevel = "{view.level}"\n')
        traces = f"[traces]\nendpoint = {json.dumps(endpoint)}\nsample = {view.sample}\n" if view.sample else ""
        return text + traces

    with TemporaryPool(seen) as pool:
        pool.wait_ready(lambda _: None)
        load(pool.endpoint, [body], _OPEN, 0.3)  # imports, first batches
        log = Path(places[0].log_file)
        processes = processes_of(pool)
        before, size, served = cpu_seconds(processes), log.stat().st_size, _served(pool)
        result = load(pool.endpoint, [body], _OPEN, seconds)
        time.sleep(1.0)  # what is to be written and exported of it belongs to it
        spent, written, answered = cpu_seconds(processes), log.stat().st_size - size, _served(pool) - served
        result["router_us"], result["workers_us"] = (
            1e6 * (spent[role] - before[role]) / answered for role in ("router", "workers")
        )
        result["log_bytes"] = written / answered
        result["traces"] = pool.status()["router"]["traces"]
        pool.stop()
    return result


def _served(pool: TemporaryPool) -> int:
    return sum(pool.status()["router"]["replied_total"].values())


def _core_alone() -> None:
    """The decisions alone: what sampling costs the requests that are not sampled, and those that are."""
    print(
        "## The router's core alone, us a request, without the thread that exports\n\n| off | 1 % | 100 % |\n| ---: | ---: | ---: |"
    )
    specs = (TraceSpec(), TraceSpec("http://c/", sample=0.01), TraceSpec("http://c/", sample=1.0))
    benches = [Bench(4, 1, 0, spec) for spec in specs]
    cells: list[list[float]] = [[] for _ in benches]
    for _ in range(60):  # in turns, and the least of each: a tenth of a microsecond is looked for, and noise only adds
        for bench, cell in zip(benches, cells, strict=True):
            cell.append(bench.turns(30))
    print(f"| {' | '.join(f'{min(cell):.2f}' for cell in cells)} |\n")


@contextmanager
def _collector() -> Iterator[str]:
    """A collector that takes everything and looks at nothing."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()
