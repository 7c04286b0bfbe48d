"""The host's budget for real, in processes of their own, and a card's on a pretended torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.worker.budget import RESERVE_BYTES, CardBudget, HostBudget
from support.pretended_torch import PretendedTorch

MIB = 1 << 20

ENFORCED = """
import sys
from gpupool.worker.budget import HostBudget
from gpupool.worker.faults import FaultKind, read_fault
{imports}
budget = HostBudget()
{before}
budget.set_limit(budget.used() + 200 * 2**20)
for _ in range(20):
    budget.brace()
    try:
        {take}
    except BaseException as e:
        budget.relieve()
        assert read_fault(e).kind is FaultKind.OUT_OF_MEMORY, repr(e)
    else:
        raise AssertionError("it fits")
    del _
    budget.recover()
    {less}
assert budget.used() <= budget.limit(), (budget.used(), budget.limit())
print("survived")
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("imports", "before", "take", "less"),
    [
        ("", "", "bytes(400 << 20)", "bytes(100 << 20)"),
        ("", "", "[bytes(200) for _ in range(2_000_000)]", "[bytes(200) for _ in range(200_000)]"),
        ("import numpy", "", "numpy.ones(400 << 20, numpy.uint8)", "numpy.ones(100 << 20, numpy.uint8)"),
        ("import numpy", "", "[numpy.ones(16_000, numpy.uint8) for _ in range(20_000)]", "numpy.ones(1 << 20, numpy.uint8)"),
        ("import torch", "torch.ones(9)", "torch.ones(400 << 20, dtype=torch.uint8)", "torch.ones(100 << 20, dtype=torch.uint8)"),
        ("import torch", "torch.ones(9)", "[torch.ones(16_000) for _ in range(20_000)]", "torch.ones(100)"),
    ],
    ids=["bytes", "objects", "array", "arrays", "tensor", "tensors"],
)  # fmt: skip
def test_what_does_not_fit_fails_as_out_of_memory_and_less_fits_after_it(
    imports: str, before: str, take: str, less: str
) -> None:
    for name in ("numpy", "torch"):
        if name in imports:
            pytest.importorskip(name)

    assert run(ENFORCED.format(imports=imports, before=before, take=take, less=less)) == "survived"


@pytest.mark.processes
def test_a_limit_can_be_lifted_and_set_below_what_is_used() -> None:
    code = """
from gpupool.worker.budget import HostBudget
budget = HostBudget()
budget.set_limit(1 << 20)
try:
    bytes(50 << 20)
except MemoryError:
    budget.set_limit(None)
    bytes(50 << 20)
    print(budget.limit())
"""
    assert run(code) == "None"


@pytest.mark.processes
def test_a_limit_that_somebody_else_set_is_not_passed() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, resource.RLIM_INFINITY))
from gpupool.worker.budget import HostBudget
budget = HostBudget()
budget.set_limit(1 << 40)
first = budget.limit()
budget.set_limit(None)
print(first, budget.limit())
"""
    assert run(code) == f"{1 << 30} {1 << 30}"


def test_a_peak_is_measured_to_a_mebibyte() -> None:
    budget = HostBudget()
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this kernel cannot reset the resident peak")

    def take() -> None:
        for _ in range(3):
            bytearray(b"x") * (64 * MIB)

    budget.peak_of(take)
    assert budget.peak_of(take) == pytest.approx(64 * MIB, abs=3 * MIB)
    assert budget.peak_of(lambda: None) < 3 * MIB


@pytest.mark.processes
def test_what_is_free_counts_for_nothing_at_rest() -> None:
    code = """
from gpupool.worker.budget import HostBudget
budget = HostBudget()
before = budget.at_rest()
held = [bytearray(100_000) for _ in range(500)]
full = budget.at_rest() - before
del held
print(full >> 20, (budget.at_rest() - before) >> 20)
"""
    full, left = run(code).split()
    assert int(full) >= 40
    assert int(left) < 10


@pytest.mark.processes
def test_at_rest_counts_what_the_limit_counts_also_where_one_small_block_holds_the_heap() -> None:
    """Given back it no longer is resident, and leaves no room for a large block all the same."""
    code = """
from gpupool.worker.budget import HostBudget, share_one_heap
share_one_heap()
budget = HostBudget()
budget.set_limit(budget.used() + 300 * 2**20)
before = budget.at_rest()
held = [bytes(16_000) for _ in range(10_000)]
pin = held[-1]
del held
left = budget.at_rest() - before
budget.brace()
print(left >> 20, budget.at_rest() - before == left)
budget.relieve()
print(budget.at_rest() - before == left)
"""
    left, braced, relieved = run(code).split()
    assert int(left) > 100
    assert (braced, relieved) == ("True", "True")


@pytest.mark.processes
def test_stacks_of_threads_that_are_started_late_are_no_memory_lost() -> None:
    code = """
import threading
from gpupool.worker.budget import HostBudget
budget = HostBudget()
budget.set_limit(1 << 30)
before, used = budget.at_rest(), budget.used()
done = threading.Event()
for _ in range(12):
    threading.Thread(target=done.wait).start()
print((budget.used() - used) >> 20, abs(budget.at_rest() - before) >> 20)
done.set()
"""
    counted, lost = run(code).split()
    assert int(counted) >= 12
    assert int(lost) <= 4


def test_without_a_limit_nothing_is_reserved_or_counted_beside() -> None:
    budget = HostBudget()
    budget.brace()

    assert budget.limit() is None
    assert abs(budget.fixed() - budget.used()) < RESERVE_BYTES // 2


def test_a_card_is_limited_to_its_share_and_to_what_others_leave() -> None:
    torch = PretendedTorch(total=1000, free=950)
    budget = CardBudget(torch, 0.9)
    assert budget.limit() == 900

    torch.free, torch.reserved = 400, 100
    assert budget.limit() == 500


def test_a_cards_peak_is_the_allocators_own() -> None:
    torch = PretendedTorch(total=1000, free=950)
    budget = CardBudget(torch, 0.9)
    torch.take(100)

    assert budget.peak_of(lambda: torch.give(torch.take(300))) == 300
    assert budget.used() == 100


def test_a_pool_is_one_block_given_back_into_the_cache() -> None:
    torch = PretendedTorch(total=1000, free=950)
    budget = CardBudget(torch, 0.9)

    assert budget.reserve(600) == 600
    assert (torch.allocated, torch.reserved, torch.free) == (0, 600, 350)
    budget.recover()
    assert torch.reserved == 0
