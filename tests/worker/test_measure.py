"""Measuring models by their warm-up samples, and what a worker makes of it: on a pretended card, whose allocator is exact."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from gpupool.logs import Log
from gpupool.spec import BatchingSpec, MemorySpec, ModelSpec
from gpupool.worker.ceiling import Ceilings
from gpupool.worker.device import Device
from gpupool.worker.execute import check_outputs
from gpupool.worker.exhaustion import FAILURES, LOOKS, Exhaustion
from gpupool.worker.memory import Memory
from gpupool.worker.models import Model, Prepared
from support.pretended_torch import PretendedTorch

MIB = 1 << 20
WEIGHTS = 100 * MIB


class Lines:
    """A log."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.event = self

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    warning = info

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


class Bench:
    """A worker's memory on a card of 1000 MiB, of which a model holds 100; each unit of a sample's length takes 1 MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int = 1000 * MIB, spec: MemorySpec | None = None) -> None:
        self.torch = PretendedTorch(total=total, free=total)
        monkeypatch.setitem(sys.modules, "torch", self.torch)
        self.spec = spec or MemorySpec(limit_fraction=1.0)
        self.device = Device("cuda:0", "GPU-0")
        self.device.prepare(self.spec)
        self.torch.take(WEIGHTS)
        self.ceilings, self.exhaustion, self.log = Ceilings(threading.RLock()), Exhaustion(), Lines()
        self.memory = Memory(self.device, self.ceilings, self.exhaustion, self.spec, cast("Log", self.log))
        self.batches: list[int] = []

    def forward(self, batch: list[int]) -> list[int]:
        self.batches.append(len(batch))
        self.torch.give(self.torch.take(len(batch) * max(batch) * MIB))
        return batch

    def measure(
        self, *lengths: int, forward: Callable[[list[Any]], Any] | None = None, buckets: Sequence[int] = (), most: int = 32
    ) -> None:
        model = Model(
            ModelSpec("m", batching=BatchingSpec(max_batch=most, length_buckets=tuple(buckets))), forward or self.forward
        )
        self.memory.measure([model], [[Prepared(n, n) for n in lengths]], check_outputs, lambda: None)


def test_weights_and_samples_are_told_apart_and_the_limit_starts_at_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.measure(40, most=64)

    told = bench.memory.report()
    assert told["budget_bytes"] == 1000 * MIB
    assert told["loaded_bytes"] == WEIGHTS
    assert told["plan"] == [
        {
            "model": "m", "bucket": 0, "per_sample_bytes": 40 * MIB, "scratch_bytes": 0, "error": 0.0, "measured": [1, 2, 4],
            "ceiling": 22, "limit": 15,
        }
    ]  # fmt: skip
    assert bench.ceilings.limit((0, 0)) == 15


def test_each_bucket_is_measured_by_its_longest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.measure(3, 16, 50, buckets=(16, 64))

    assert {p["bucket"]: p["per_sample_bytes"] for p in bench.memory.report()["plan"]} == {16: 16 * MIB, 64: 50 * MIB}


def test_measuring_stays_away_from_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.measure(300)

    assert max(bench.batches) == 2
    assert bench.ceilings.limit((0, 0)) == 2  # of a ceiling of 3


def test_what_does_not_fit_while_measured_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)

    def steep(batch: list[int]) -> list[int]:
        bench.torch.give(bench.torch.take((10 if len(batch) < 4 else 2000) * MIB))
        return batch

    bench.measure(1, forward=steep)

    assert bench.memory.report()["plan"][0]["ceiling"] == 3


def test_the_pool_is_reserved_so_that_batches_need_nothing_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.measure(40, most=8)
    fetched = bench.torch.from_driver
    for _ in range(100):
        bench.forward([40] * 8)

    assert bench.torch.from_driver == fetched
    told = bench.memory.report()
    assert told["pool_bytes"] == int(8 * 40 * MIB * 1.2)
    assert told["pool_used_bytes"] == 0
    bench.torch.take(40 * MIB)
    assert bench.memory.report()["pool_used_bytes"] == 40 * MIB


@pytest.mark.parametrize(
    ("lengths", "reason"), [((), "no warm-up samples"), ((1,), "TypeError at test_measure")], ids=["no samples", "raises"]
)
def test_where_nothing_can_be_planned_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], reason: str
) -> None:
    bench = Bench(monkeypatch)

    def picky(batch: list[int]) -> list[int]:
        if len(batch) > 1:
            raise TypeError("unlike shapes")
        return batch

    bench.measure(*lengths, forward=picky)

    assert reason in bench.log.of("memory_not_planned")[0]["reason"]
    assert bench.ceilings.limits() == {}


def test_without_a_budget_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    device, ceilings, log = Device("cpu", "cpu:0"), Ceilings(), Lines()
    memory = Memory(device, ceilings, Exhaustion(), MemorySpec(), cast("Log", log))

    def forward(batch: list[int]) -> list[int]:
        raise AssertionError("it was run")

    memory.measure([Model(ModelSpec("m"), forward)], [[Prepared(1, 1)]], check_outputs, lambda: None)

    assert memory.report()["budget_bytes"] is None
    assert "plan" not in memory.report()


def test_a_reload_while_the_plan_is_put_into_force_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.torch.free -= 400 * MIB
    put_into_force = bench.ceilings.plan

    def reload() -> None:
        bench.torch.free += 400 * MIB  # the budget that the reload brings
        bench.memory.settings(MemorySpec(limit_fraction=1.0, start_fraction=1.0))

    reloading = threading.Thread(target=reload)

    def plan(ceilings: Any, start_fraction: float) -> None:
        if reloading.ident is None:
            reloading.start()
            reloading.join(0.5)  # as far as it can: it may have to wait for us
        put_into_force(ceilings, start_fraction)

    monkeypatch.setattr(bench.ceilings, "plan", plan)
    bench.measure(40, most=64)
    reloading.join()

    assert bench.log.of("memory_planned")[-1]["why"] == "reloaded"
    assert bench.ceilings.limits() == {(0, 0): bench.log.of("memory_planned")[-1]["groups"][0]["ceiling"]}


def test_a_reload_changes_what_counts_as_lost_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without a limit goes by the host's memory until a reload brings a limit."""
    monkeypatch.setitem(sys.modules, "torch", None)
    device, ceilings, exhaustion = Device("cpu", "cpu:0"), Ceilings(), Exhaustion()
    memory = Memory(device, ceilings, exhaustion, MemorySpec(), cast("Log", Lines()))
    memory.measure([], [], check_outputs, lambda: None)
    limited: list[MemorySpec] = []
    monkeypatch.setattr(device, "limit", limited.append)
    monkeypatch.setattr(device.budget, "limit", lambda: 600 * MIB if limited else None)

    memory.settings(MemorySpec(cpu_limit_bytes=600 * MIB))
    for second in range(FAILURES):
        exhaustion.failed(1, float(second))
    for _ in range(LOOKS):
        exhaustion.judge(memory.loaded_bytes + 400 * MIB, 3.0)

    assert exhaustion.recycle_reason is not None
