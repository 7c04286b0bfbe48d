"""Large requests for a worker that takes many at a time: the router keeps a copy of all that it has sent, until it is answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from demonstrations.finding import Finding, below, equal, told
from support.running import RunningPool

_MIB: Final = 1 << 20
_MAX_PENDING_BYTES: Final = 32 * _MIB
_BODY_BYTES: Final = 5_000_000
_REQUESTS: Final = 80
CONFIG: Final = f"[router]\nmax_pending_bytes = {_MAX_PENDING_BYTES}\nmax_message_bytes = {16 * _MIB}\n"


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Occupy the only worker for so long, and send what it and the router have room for, and more."""
    with RunningPool(folder, "paced_model:Paced", workers=1, config=CONFIG) as pool:
        pool.start()
        router = psutil.Process(pool.status()["router"]["pid"])
        with pool.client() as client:
            for n in range(5):
                client.call({"n": n})
            before = peak = router.memory_info().rss / _MIB
            client.send({"n": 0, "sleep": seconds}, id="long")
            pool.wait(lambda s: s["workers"][0]["running"] == 1)
            for n in range(_REQUESTS):
                client.send({"n": n, "b": bytes(_BODY_BYTES)}, id=f"large {n}")
            end = time.monotonic() + seconds - 1.0
            while time.monotonic() < end:
                peak = max(peak, router.memory_info().rss / _MIB)
                time.sleep(0.02)
            books = pool.status()["router"]
            replies = client.collect(1 + _REQUESTS, within=60.0)
            codes = sorted({header["code"] for header, _ in replies.values()})
        return [
            equal("answers", codes, ["ok", "overloaded"]),
            told(
                "while the worker was busy: waiting in the router, sent to the worker",
                f"{books['pending']}, {books['in_flight']}",
            ),
            below("growth of the router", peak - before, _MAX_PENDING_BYTES / _MIB + 100, "MiB"),
        ]
