"""The card's side of the device, on a pretended torch."""

from __future__ import annotations

import sys

import pytest

from gpupool.spec import MemorySpec
from gpupool.worker.device import Device
from support.pretended_torch import PretendedTorch

KIB = 1024


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> PretendedTorch:
    module = PretendedTorch(total=1000 * KIB, free=1000 * KIB)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def made(torch: PretendedTorch, **memory: float) -> tuple[Device, list[float]]:
    now = [0.0]
    device = Device("cuda:0", "GPU-0", clock=lambda: now[0])
    device.prepare(MemorySpec(**memory))  # type: ignore[arg-type]
    return device, now


def test_the_share_of_the_card_is_put_into_force_before_anything_is_allocated(torch: PretendedTorch) -> None:
    device, _ = made(torch, limit_fraction=0.5)

    assert torch.fraction == 0.5
    assert device.budget.limit() == 500 * KIB


def test_the_cache_is_given_back_above_the_threshold_only(torch: PretendedTorch) -> None:
    device, now = made(torch, limit_fraction=1.0, empty_cache_above=0.5)
    torch.give(torch.take(400 * KIB))
    device.tidy()
    assert torch.emptied == 0

    torch.give(torch.take(600 * KIB))
    now[0] = 2.0
    device.tidy()
    assert (torch.emptied, torch.reserved) == (1, 0)
    assert device.memory()["cache_emptied_total"] == 1


def test_the_cache_is_not_given_back_for_every_batch(torch: PretendedTorch) -> None:
    device, now = made(torch, limit_fraction=1.0, empty_cache_above=0.5)
    for batch in range(1000):
        now[0] = batch * 0.01
        torch.give(torch.take(600 * KIB))
        device.tidy()

    assert torch.emptied <= 2


def test_a_cache_that_is_in_use_is_left_alone(torch: PretendedTorch) -> None:
    device, _ = made(torch, limit_fraction=1.0, empty_cache_above=0.5)
    torch.take(600 * KIB)
    device.tidy()

    assert torch.emptied == 0


def test_a_cpu_worker_never_looks_at_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    device = Device("cpu", "cpu:0")
    device.prepare(MemorySpec())
    device.tidy()

    assert device.memory() == {}
    assert device.budget.limit() is None
