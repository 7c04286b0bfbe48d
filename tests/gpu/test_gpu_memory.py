"""Budget, plan, pool and ladder on a real card, in a process of their own: the limit stays with the process that set it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

HEAD = """
import torch
from gpupool.spec import BatchingSpec, MemorySpec, ModelSpec
from gpupool.worker.ceiling import Ceilings
from gpupool.worker.device import Device
from gpupool.worker.execute import check_outputs
from gpupool.worker.exhaustion import Exhaustion
from gpupool.worker.faults import FaultKind, read_fault
from gpupool.worker.memory import Memory
from gpupool.worker.models import Model, Prepared

class Log:
    def __init__(self): self.event = self
    def info(self, event, **fields): print(event, fields)
    warning = error = info

MIB = 1 << 20
spec = MemorySpec(limit_fraction=0.05)
device = Device("cuda:0", "GPU-unknown"[:0])
device.prepare(spec)
weights = torch.ones(100 * MIB, dtype=torch.uint8, device="cuda:0")

def forward(batch):
    block = torch.ones(len(batch) * 16 * MIB, dtype=torch.uint8, device="cuda:0")
    return [int(block[0])] * len(batch)
"""


def run(code: str) -> str:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no card that torch can use")
    done = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, timeout=110, check=False)
    print(done.stdout)  # for the record
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_share_of_the_card_is_enforced_and_recovered_from() -> None:
    out = run("""
limit = device.budget.limit()
for _ in range(3):
    try:
        forward(range(limit // (16 * MIB) + 8))
    except BaseException as e:
        assert read_fault(e).kind is FaultKind.OUT_OF_MEMORY, repr(e)
    else:
        raise AssertionError("more than the limit was given")
    device.release()
    forward(range(4))
print("survived")
""")
    assert "survived" in out


def test_the_plan_is_true_and_the_pool_spares_the_driver() -> None:
    out = run("""
ceilings = Ceilings()
memory = Memory(device, ceilings, Exhaustion(), spec, Log())
model = Model(ModelSpec("m", batching=BatchingSpec(max_batch=4096)), forward)
memory.measure([model], [[Prepared(1, 1)]], check_outputs, lambda: None)
told = memory.report()
print(told)
plan = told["plan"][0]
assert abs(plan["per_sample_bytes"] - 16 * MIB) < MIB, plan
assert told["pool_bytes"] > 0
before = torch.cuda.memory_stats()["num_device_alloc"] if "num_device_alloc" in torch.cuda.memory_stats() else 0
for _ in range(50):
    forward(range(plan["limit"]))
after = torch.cuda.memory_stats().get("num_device_alloc", 0)
assert after == before, (before, after)
forward(range(int(plan["ceiling"] * 0.9)))
try:
    forward(range(int(plan["ceiling"] * 1.2) + 4))
except BaseException as e:
    assert read_fault(e).kind is FaultKind.OUT_OF_MEMORY, repr(e)
else:
    raise AssertionError("the ceiling is too low")
print("true")
""")
    assert "true" in out
