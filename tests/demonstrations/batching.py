"""Batching pays what arithmetic says: a network in torch whose batches cost a + b n, with batches of up to 32 and of one.

a and b are the worker's own fit, as `status` tells it, and for comparison that of a bare loop over the same network in a process of its own.
The bound is the ratio of a loop without any pool, (a + b) / (a / 32 + b).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from demonstrations import load
from demonstrations.finding import Finding, above, equal, told
from demonstrations.load import Job
from support.running import HERE, RunningPool

LIMIT: Final = 32
LAYERS, WIDTH = 300, 192
_OPEN: Final = 3 * LIMIT
#: Rounds of each, taking turns: a machine that becomes slower meanwhile is so for both.
_ROUNDS: Final = 2
#: A bare loop: milliseconds of batches of each size, the least of many, which is what they cost when nobody disturbs.
_LOOP: Final = """
import json, sys, time, types, torch
from noted_models import Mlp
m = Mlp()
m.load(types.SimpleNamespace(options={"notes": "/dev/null", "layers": int(sys.argv[1]), "width": int(sys.argv[2])}))
found = {}
with torch.inference_mode():
    for turn in range(40):
        for n in (1, 2, 4, 8, 16, 32):
            began = time.perf_counter()
            m.forward([{"n": 1}] * n)
            found.setdefault(n, []).append(1000 * (time.perf_counter() - began))
print(json.dumps({n: sorted(t)[len(t) // 4] for n, t in found.items()}))
"""


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Take turns between the two limits on one pool, and read the fit."""
    loop = _loop()
    options = f'layers = {LAYERS}, width = {WIDTH}, notes = "{folder / "notes"}"'
    config = f"[batching]\nmax_batch = {LIMIT}\nmin_batch = 1\n"
    rates: dict[int, list[float]] = {LIMIT: [], 1: []}
    failed = 0
    with RunningPool(
        folder, "noted_models:Mlp", workers=1, options=options, config=config, env={"OMP_NUM_THREADS": "1"}
    ) as pool:
        pool.start()
        # Batches of all sizes, so that the line can be told apart from a point.
        for open_ in (1, 4, 12, 24, 48, _OPEN):
            load.run(Job(load.endpoint(pool), 1.5, open=open_))
        fit = pool.wait(lambda s: s["workers"][0].get("batching", {}).get("groups"))["workers"][0]["batching"]["groups"][0][
            "fit"
        ]
        for _ in range(_ROUNDS):
            for limit in (LIMIT, 1):
                text = pool.file.read_text()
                was = "max_batch = 1\n" if limit != 1 else f"max_batch = {LIMIT}\n"
                pool.file.write_text(text.replace(was, f"max_batch = {limit}\n"))
                assert pool.ask("reload")["ok"]
                each_s = seconds / 2 / _ROUNDS
                seen = load.run(Job(load.endpoint(pool), each_s, open=_OPEN))
                rates[limit].append(seen.ok_per_s(0.5, each_s))
                failed += sum(seen.codes.values()) - seen.codes["ok"]
    ratio = sum(rates[LIMIT]) / sum(rates[1])
    expected = _ratio(fit["fixed_ms"], fit["per_sample_ms"])
    b = (loop[LIMIT] - loop[1]) / (LIMIT - 1)
    a = loop[1] - b
    return [
        equal("answers other than ok", failed, 0),
        told("requests/s, max_batch 32 and 1", ", ".join(f"{sum(r) / len(r):.0f}" for r in rates.values())),
        told("a and b, the worker's fit", f"{fit['fixed_ms']:.2f} ms, {fit['per_sample_ms']:.3f} ms, residual {fit['residual_ms']:.2f} ms"),
        told("a and b, a bare loop of 1 and 32", f"{a:.2f} ms, {b:.3f} ms"),
        told("ratio of the two rates", f"{ratio:.2f}"),
        told("(a + b) / (a / 32 + b), by the worker's fit", f"{expected:.2f}"),
        told("the same by the bare loop", f"{_ratio(a, b):.2f}"),
        above("ratio reached, of the one by the bare loop", ratio / _ratio(a, b), 0.8, "", timed=True),
    ]  # fmt: skip


def _ratio(a: float, b: float) -> float:
    return (a + b) / (a / LIMIT + b)


def _loop() -> dict[int, float]:
    env = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOOP, str(LAYERS), str(WIDTH)], env=env, capture_output=True, text=True, check=True
    )
    return {int(n): ms for n, ms in json.loads(done.stdout).items()}
