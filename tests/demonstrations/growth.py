"""Tens of thousands of requests, small and large, good, failing and expiring, and what memory they leave behind in each process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from demonstrations.finding import Finding, below, equal, told
from support.running import RawClient, RunningPool

_MIB: Final = 1 << 20
_SMALL_PER_S: Final = 500  # of the time that is given: 50,000 in 100 s
_LARGE_PER_S: Final = 20
_LARGE_BYTES: Final = 1_000_000
_ROUNDS: Final = 9
_WARM_UP: Final = 2  # rounds more
#: An hour: what waits is held until it is answered, not until somebody's timer has run.
_LONG_MS: Final = 3_600_000
_OPEN: Final = 100
#: Small requests at the end of each round, so that no large one is what a process touched last.
_LAST: Final = 200
_EACH_S: Final = 60.0
CONFIG: Final = "[batching]\nmax_batch = 32\n[router]\nmax_pending = 1000\n[supervision]\nrestart_delays_s = [0.0]\n"
_KINDS: Final = ["deadline_exceeded", "model_error", "ok"]
#: MiB, of the whole pool's life after its warm-up.
_WORKER_MIB: Final = 5.0
_ROUTER_MIB: Final = 10.0
_SUPERVISOR_MIB_PER_10000: Final = 1.0


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Send two rounds as warm-up, then nine, and look at the processes at rest after each.

    What a process holds at rest goes up and down by some MiB, as the allocator has it: the lowest of the first and of the last looks are compared.
    """
    small, large = int(_SMALL_PER_S * seconds / _ROUNDS), int(_LARGE_PER_S * seconds / _ROUNDS)
    with RunningPool(folder, "paced_model:Paced", options="fixed_s = 0.002", config=CONFIG) as pool:
        pool.start()
        codes: Counter[str] = Counter()
        looks = []
        began = time.monotonic()
        with pool.client() as client:
            for _ in range(_WARM_UP + _ROUNDS):
                codes += _send(client, _requests(small, large))
                codes += _send(client, (({"n": n}, _LONG_MS) for n in range(_LAST)))
                looks.append(_at_rest(pool))
        took_s = time.monotonic() - began
        alive = {worker["incarnation"] for worker in pool.status()["workers"]}
    looks = looks[_WARM_UP - 1 :]
    first = looks[0]
    half = len(looks) // 2
    growth = {
        name: (min(look[name] for look in looks[half:]) - min(look[name] for look in looks[:half])) / _MIB for name in first
    }
    sent = (_WARM_UP + _ROUNDS) * (small + large + _LAST)
    counted = _ROUNDS * (small + large) / 10_000
    workers = max(mib for name, mib in growth.items() if name.startswith("worker"))
    return [
        told("requests after the warm-up", f"{_ROUNDS * small:,} small, {_ROUNDS * large:,} of 1 MB, {took_s:.0f} s with it"),
        told("answers", dict(codes.most_common())),
        equal("sent = answered", codes.total(), sent),
        equal("kinds of answers, besides requests refused since they would expire", sorted({*codes} - {"overloaded"}), _KINDS),
        equal("processes that were replaced", alive - {1}, set()),
        told("MiB at rest, by rounds", "; ".join(f"{name} {_row(looks, name)}" for name in first)),
        below("growth of the supervisor for 10,000 requests", growth["supervisor"] / counted, _SUPERVISOR_MIB_PER_10000, "MiB"),
        below("growth of the router", growth["router"], _ROUTER_MIB, "MiB"),
        below("growth of a worker", workers, _WORKER_MIB, "MiB"),
    ]


def _requests(small: int, large: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Samples and time-outs: every tenth fails, every seventh has expired, or would have, by the time that it could run."""
    every = max(1, small // max(1, large))
    for n in range(small):
        yield {"n": n, **({"do": "raise"} if n % 10 == 0 else {})}, 1 if n % 7 == 0 else _LONG_MS
        if n % every == 0 and n // every < large:
            yield {"n": n, "b": bytes(_LARGE_BYTES), "back": n % 2 == 0}, _LONG_MS


def _send(client: RawClient, requests: Iterator[tuple[dict[str, Any], int]]) -> Counter[str]:
    """Send all, so many open at a time; returns the codes."""
    codes: Counter[str] = Counter()
    open_ = 0
    for sample, timeout_ms in requests:
        while open_ >= _OPEN:
            open_ -= _take(client, codes)
        client.send(sample, timeout_ms=timeout_ms)
        open_ += 1
    while open_:
        open_ -= _take(client, codes)
    return codes


def _take(client: RawClient, codes: Counter[str]) -> int:
    reply = client.receive(_EACH_S)
    assert reply, f"no reply within {_EACH_S:g} s; so far {dict(codes)}"
    codes[reply[0]["code"]] += 1
    return 1


def _at_rest(pool: RunningPool) -> dict[str, int]:
    """Resident bytes of every process once nothing is under way."""
    status = pool.wait(lambda s: not s["router"]["pending"] and not s["router"]["in_flight"])
    pids = {"supervisor": status["pool"]["pid"], "router": status["router"]["pid"]}
    pids |= {f"worker {worker['worker']}": worker["pid"] for worker in status["workers"]}
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}


def _row(looks: Sequence[dict[str, int]], name: str) -> str:
    return " ".join(f"{look[name] / _MIB:.1f}" for look in looks)
