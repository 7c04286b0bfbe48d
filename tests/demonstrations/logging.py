"""What the log costs at full load, and what a full disk, a closed pipe and a Fluentd that takes nothing cost: no request.

Full load is a closed loop, once at a model that takes its time as on a card, so that the pool is what is full, and once at one that does
nothing, so that the router is; the log is turned off and on in turns, in the same pool, by `log-level`. The other cases get a steady rate,
far below that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import psutil

from demonstrations import load
from demonstrations.finding import Finding, above, below, equal, told
from demonstrations.load import Job, Seen
from support.forward_receiver import ForwardReceiver
from support.running import RunningPool

_TURNS: Final = 6
_RATE: Final = 400.0
#: Name, handler, options, lines for the model's table, share of the request lines, and the share of the throughput that must be left.
#: The first can do 2,000 requests a second, 32 in 16 ms. Of a router that is full a line for each of 28,000 requests takes its part.
_FULL: Final = (
    ("a model of 2,000/s", "toy_models:Sleep", "seconds = 0.016", "max_batch = 32\n", 1.0, 0.95),
    ("a model that does nothing", "toy_models:Echo", "", "", 1.0, 0.75),
    ("the same, a tenth of the lines", "toy_models:Echo", "", "", 0.1, 0.95),
)
_CASES: Final = (
    "file",
    "file again",
    "full disk",
    "closed pipe",
    "Fluentd",
    "Fluentd, black hole",
    "Fluentd, no acknowledgements",
)


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Measure the throughput with and without request lines, then each case."""
    part = seconds / (_TURNS * 2 * len(_FULL) + len(_CASES) + 2)
    findings = [finding for n, full in enumerate(_FULL) for finding in _full_load(folder / f"load-{n}", part, *full)]
    normal = float("inf")
    for case in _CASES:
        seen, lost, forwarding = _steady(folder / case.replace(" ", "-"), case, max(2.0, part))
        p95 = 1000 * load.percentile(seen.latencies.get("ok", []), 0.95)
        findings.append(equal(f"{case}: answers that are not `ok`", seen.sent - seen.codes["ok"], 0))
        if case.startswith("file"):
            normal = min(normal, p95)  # the calmer of two: a disturbed one would excuse everything
            findings.append(told(f"{case}: p95", f"{p95:.2f} ms"))
        else:
            # Beside the ratio a millisecond for the machine: so small times differ by as much from run to run.
            findings.append(below(f"{case}: p95", p95, 1.5 * normal + 1.0, "ms", timed=True))
        if case in ("full disk", "closed pipe"):
            findings.append(above(f"{case}: lost lines counted by the router", lost, seen.sent, ""))
        else:
            findings.append(equal(f"{case}: lost lines", lost, 0))
        if forwarding:
            findings.append(told(f"{case}: forward", forwarding))
    return [*findings, *_back(folder / "back", max(4.0, 2 * part))]


def _full_load(
    folder: Path, seconds: float, name: str, handler: str, options: str, table: str, sample: float, left: float
) -> Iterator[Finding]:
    folder.mkdir()
    config = f"{table}{_config(folder)}request_sample = {sample}\n"
    with RunningPool(folder, handler, workers=1, options=options, config=config) as pool:
        pool.start()
        job = Job(load.endpoint(pool), seconds, connections=8, open=128)
        load.run(job)  # warm
        router = psutil.Process(pool.status()["router"]["pid"])
        rates: dict[str, list[float]] = {"error": [], "info": []}
        costs: dict[str, list[float]] = {"error": [], "info": []}
        for turn in range(2 * _TURNS):
            level = ("error", "info")[turn % 2]
            assert pool.ask("log_level", component="router", level=level)["ok"]
            time.sleep(1.2)  # the router looks once a second
            before = sum(router.cpu_times()[:2])
            seen = load.run(job)
            rates[level].append(seen.ok_per_s(0.0, seconds))
            costs[level].append(1e6 * (sum(router.cpu_times()[:2]) - before) / seen.sent)
        lines = [line for line in (folder / "log").read_bytes().splitlines(keepends=True) if b'"event":"request"' in line]
        pairs = [on / off for off, on in zip(rates["error"], rates["info"], strict=True)]
        off, on = (median(costs[level]) for level in ("error", "info"))
        yield told(f"{name}: throughput without request lines, in turns", ", ".join(f"{rate:.0f}" for rate in rates["error"]))
        yield told(f"{name}: throughput with them", ", ".join(f"{rate:.0f}" for rate in rates["info"]))
        yield above(f"{name}: throughput with request lines, of that without, median", median(pairs), left, "", timed=True)
        yield told(f"{name}: CPU of the router a request without and with them, median", f"{off:.1f} and {on:.1f} µs")
        yield told(f"{name}: bytes a request line", f"{sum(map(len, lines)) / len(lines):.0f}")
        yield equal(f"{name}: request lines lost", pool.status()["router"]["log"]["losses"].get("info", 0), 0)


def _steady(folder: Path, case: str, seconds: float) -> tuple[Seen, int, object]:
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        config = _config(folder)
        if case == "full disk":
            config = '[logs]\nfile = "/dev/full"\n'
        elif case == "closed pipe":
            config = ""
        elif case.startswith("Fluentd"):
            mode = {"Fluentd": "ack", "Fluentd, black hole": "hole"}.get(case, "withhold")
            receiver = stack.enter_context(ForwardReceiver(mode=mode))
            config += f'fluentd = "{receiver.address}"\n'
        pool = stack.enter_context(RunningPool(folder, "toy_models:Echo", workers=1, config=config))
        if case == "closed pipe":
            reader, pool.stderr = os.pipe()
            os.close(reader)
        pool.start()
        seen = load.run(Job(load.endpoint(pool), seconds, connections=4, rate=_RATE))
        time.sleep(0.5)
        told_by_router = pool.status()["router"]["log"]
    return seen, sum(told_by_router["losses"].values()), told_by_router["forwarding"]


def _back(folder: Path, seconds: float) -> Iterator[Finding]:
    """A receiver is killed, comes back as a black hole, then as itself, all under load."""
    folder.mkdir()
    first = ForwardReceiver()
    receivers = [first]
    returned = 0.0

    def disturb() -> None:
        nonlocal returned
        time.sleep(seconds / 4)
        first.close()
        time.sleep(seconds / 4)
        receivers.append(ForwardReceiver(first.port, mode="hole"))
        time.sleep(seconds / 4)
        receivers[-1].close()
        receivers.append(ForwardReceiver(first.port))
        returned = time.monotonic()

    config = f'{_config(folder)}fluentd = "{first.address}"\n'
    with RunningPool(folder, "toy_models:Echo", workers=1, config=config) as pool:
        pool.start()
        trouble = threading.Thread(target=disturb)
        trouble.start()
        seen = load.run(Job(load.endpoint(pool), seconds, connections=4, rate=_RATE))
        trouble.join()
        last = receivers[-1]
        last.wait(lambda: any(r["event"] == "request" for r in last.records), within=60.0)
        resumed_s = time.monotonic() - returned
        pool.wait(lambda s: s["router"]["log"]["forwarding"]["waiting"] == 0)
        forwarding = pool.status()["router"]["log"]["forwarding"]
    names = [r["request_id"] for one in receivers for r in one.records if r["event"] == "request"]
    yield equal("receiver killed, black hole, back: answers that are not `ok`", seen.sent - seen.codes["ok"], 0)
    yield below("delivery resumed after", resumed_s, 10.0, "s", timed=True)
    yield told("forward at the end", forwarding)
    yield equal(
        "requests that reached a receiver, of those not counted as dropped", len(set(names)), seen.sent - forwarding["dropped"]
    )
    for one in receivers:
        one.close()


def _config(folder: Path) -> str:
    return f'[logs]\nfile = "{folder}/log"\n'
