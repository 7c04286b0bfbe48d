"""More CPU workers than cores do not make a pool slower: each has its share of the cores for its threads, unless an operator says otherwise.

Pools of 1, 2 and 4 workers over a product of matrices in torch, without OMP_NUM_THREADS and its kin; and one of 4 whose operator has
given each worker all cores. All are up the whole time and take turns, so that a machine that becomes slower meanwhile is so for all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from demonstrations import load
from demonstrations.finding import Finding, above, equal, told
from demonstrations.load import Job
from support.running import RunningPool

SIZE: Final = 384
_OPEN: Final = 8
_ROUNDS: Final = 3
_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Let four pools take turns."""
    cores = len(os.sched_getaffinity(0))
    rates: dict[str, list[float]] = {}
    failed = 0
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(_pool(folder / name, count, given)) for name, count, given in (
            ("1", 1, None), ("2", 2, None), ("4", 4, None), ("4, all cores each", 4, cores),
        )}  # fmt: skip
        for pool in pools.values():
            pool.start()
        threads = {name: _threads(pool) for name, pool in pools.items()}
        for pool in pools.values():
            load.run(Job(load.endpoint(pool), 1.0, open=_OPEN))
        each_s = seconds / _ROUNDS / len(pools)
        for _ in range(_ROUNDS):
            for name, pool in pools.items():
                seen = load.run(Job(load.endpoint(pool), each_s, open=_OPEN))
                rates.setdefault(name, []).append(seen.ok_per_s(0.2 * each_s, each_s))
                failed += sum(seen.codes.values()) - seen.codes["ok"]
    mean = {name: sum(each) / len(each) for name, each in rates.items()}
    return [
        equal("answers other than ok", failed, 0),
        *(
            equal(f"threads of a worker of {name}, {cores} cores", threads[name], max(1, cores // int(name)))
            for name in ("1", "2", "4")
        ),
        equal("threads where the operator gave all cores", threads["4, all cores each"], cores),
        told("products/s with 1, 2 and 4 workers", ", ".join(f"{mean[name]:.0f}" for name in ("1", "2", "4"))),
        told("2 workers against 1", f"{mean['2'] / mean['1']:.2f}"),
        above("4 workers against 2", mean["4"] / mean["2"], 0.8, "", timed=True),
        told("4 workers with all cores each against 2", f"{mean['4, all cores each'] / mean['2']:.2f}"),
    ]


def _pool(folder: Path, workers: int, threads: int | None) -> RunningPool:
    folder.mkdir()
    options = f'size = {SIZE}, notes = "{folder / "notes"}"'
    pool = RunningPool(folder, "noted_models:Product", workers=workers, options=options, config="[batching]\nmax_batch = 1\n")
    for name in _VARIABLES:
        pool.env.pop(name, None)
        if threads is not None:
            pool.env[name] = str(threads)
    return pool


def _threads(pool: RunningPool) -> int:
    with pool.client() as client:
        return int(client.call({})[1])
