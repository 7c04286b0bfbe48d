"""The tuning story on this host's own card: MiniLM from one request at a time to tuned batches in half precision, one variable a step.

Prints the table that REQUIREMENTS calls the yardstick, each step beside the one before and beside the first. Without a card it says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

import msgpack

from gpupool.demo import demo_config, devices_for, read_paragraphs
from gpupool.temporary_pool import Place, TemporaryPool

from .measure import Result, load, mid

#: torch asks the driver for each tensor: what a pool of memory saves.
_NO_POOL: Final = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
#: Nothing compared here is about length buckets but the last step.
_ONE_BUCKET: Final = "length_buckets = []"


@dataclass(frozen=True, slots=True)
class Step:
    """One variable more than the step before."""

    name: str
    open: int
    batching: str
    options: str = "{}"
    environment: Mapping[str, str] | None = None


STEPS: Final = (
    Step("one at a time", 1, f"max_batch = 1\n{_ONE_BUCKET}", environment=_NO_POOL),
    Step("64 open, no batches", 64, f"max_batch = 1\n{_ONE_BUCKET}", environment=_NO_POOL),
    Step("batches of 32", 64, f"max_batch = 32\n{_ONE_BUCKET}", environment=_NO_POOL),
    Step("memory pool", 64, f"max_batch = 32\n{_ONE_BUCKET}"),
    Step("half precision", 64, f"max_batch = 32\n{_ONE_BUCKET}", '{ precision = "fp16" }'),
    Step("tuned: batches of 128, length buckets", 256, "max_batch = 128\nmin_batch = 32", '{ precision = "fp16" }'),
)


def story(seconds: float, rounds: int, *, devices: str | None = None) -> int:
    """Measure every step and print the table; return how many requests failed. `devices`: a TOML value, default one card."""
    if devices is None:
        if devices_for(None) != '"auto"':
            print("## The tuning story\n\nNo card that torch can use is here: not run.\n")
            return 0
        devices = devices_for(1)
    texts = [msgpack.packb({"text": text}) for text in read_paragraphs(None)]
    results: dict[str, list[Result]] = {step.name: [] for step in STEPS}
    for _ in range(rounds):  # step by step in each round: what the card does by heat is shared out
        for step in STEPS:
            with TemporaryPool(partial(_config, devices=devices, step=step), environment=_environment(step)) as pool:
                pool.wait_ready(lambda _: None)
                results[step.name].append(load(pool.endpoint, texts, step.open, seconds, warm_up=2.0))
                pool.stop()
    _print(results)
    return sum(r["failed"] for each in results.values() for r in each)


def _config(place: Place, *, devices: str, step: Step) -> str:
    text = demo_config(place, devices)
    text = text.replace("max_batch = 32\n", f"{step.batching}\n")
    if "length_buckets = []" in step.batching:
        text = text.replace("length_buckets = [32, 64, 128, 256]\n", "")
    return f"{text}options = {step.options}\n"


def _environment(step: Step) -> dict[str, str]:
    return {**os.environ, **(step.environment or {})}


def _print(results: Mapping[str, Sequence[Result]]) -> None:
    print("## The tuning story: MiniLM, one worker\n")
    print(
        "| step | texts /s | p50 ms | p99 ms | to the step before | to the first |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    first = before = median(r["per_s"] for r in results[STEPS[0].name])
    for name, each in results.items():
        rate = mid(each, "per_s")
        print(
            f"| {name} | {rate:,.0f} | {mid(each, 'p50_ms'):.1f} | {mid(each, 'p99_ms'):.1f} "
            f"| {rate / before:.2f} | {rate / first:.2f} |"
        )
        before = rate
    by_name = {name: mid(each, "per_s") for name, each in results.items()}
    ratios = {
        "batches": by_name["batches of 32"] / by_name["64 open, no batches"],
        "pool": by_name["memory pool"] / by_name["batches of 32"],
        "fp16": by_name["half precision"] / by_name["memory pool"],
    }
    print(f"\nRatios: {json.dumps({name: round(value, 2) for name, value in ratios.items()})}\n")
