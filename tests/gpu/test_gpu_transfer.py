"""Results from a real card and samples to it, through pinned memory: what arrives, what must not change afterwards, and what it gains."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

HEAD = """
import os, statistics, time
import numpy as np
import torch
from gpupool.worker import transfer
from gpupool.worker.faults import FaultKind, read_fault
from gpupool.worker.models import Context

CARD = "cuda:0"
context = Context(CARD, {}, "", None, 1)
to_host = lambda outputs, **bound: transfer.to_host(torch, outputs, **bound)
# Keeps the card busy, so that all that is launched after it is still on its way when the host goes on.
keep_busy = lambda: torch.cuda._sleep(200_000_000)

def seconds(do):
    times = []
    for _ in range(60):
        torch.cuda.synchronize()
        began = time.perf_counter()
        do()
        times.append(time.perf_counter() - began)
    return statistics.median(times[10:])

def tell(what, was, now):
    print(f"{what}: {1e6 * was:.0f} us before, {1e6 * now:.0f} us now, ratio {was / now:.2f}")
"""


def run(code: str) -> str:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")
    if not torch.cuda.is_available():
        pytest.skip("no card that torch can use")
    done = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, timeout=110, check=False)
    print(done.stdout)  # for the record
    assert not done.returncode, done.stderr
    return done.stdout


def test_results_arrive_as_they_were_in_pinned_memory_up_to_the_bound() -> None:
    out = run("""
base = torch.randn(64, 48, device=CARD)
wave = torch.randn(5, dtype=torch.complex64, device=CARD)
tensors = {
    "plain": base, "row": base[3], "columns": base[:, ::3], "transposed": base.t(), "part of it": base.t()[::2, 1:],
    "expanded": base[:1].expand(7, 48), "conjugate": wave.conj(), "negative": wave.conj().imag, "empty": base[:0], "number": base.sum(),
    "bool": base > 0, "half": base.half(), "bfloat16": base.bfloat16(), "long": base.long(), "sparse": base.relu().to_sparse(),
    "of the host": torch.ones(3), "with a gradient": torch.ones(3, device=CARD, requires_grad=True),
}
keep_busy()
noise = [torch.randn(1 << 20, device=CARD) for _ in range(4)]
found = to_host(tensors)
for name, tensor in tensors.items():
    assert found[name].device.type == "cpu", name
    assert found[name].dtype == tensor.dtype and not found[name].requires_grad, name
    assert torch.equal(found[name].to_dense(), tensor.detach().cpu().to_dense()), name
assert found["plain"].is_pinned()
assert not to_host(base, pinned_bytes=base.nbytes - 1).is_pinned()
nested = to_host([{"x": base, "n": 1}, (base[0], "text", None)])
assert nested[0]["n"] == 1 and nested[1][1:] == ("text", None) and torch.equal(nested[1][0], base[0].cpu())
print("equal")
""")
    assert "equal" in out


def test_results_do_not_change_while_later_batches_run_and_are_copied() -> None:
    out = run("""
held = []
for batch in range(40):
    held.append((batch, to_host([torch.full((n, 1000), float(batch), device=CARD) for n in range(1, 9)])))
    if batch % 4 == 3:  # some are let go of, so that blocks are used again
        del held[-3:-1]
for batch, tensors in held:
    for tensor in tensors:
        assert (tensor == batch).all(), batch
print("unchanged")
""")
    assert "unchanged" in out


def test_samples_arrive_though_the_next_batch_is_put_together_while_they_are_on_their_way() -> None:
    out = run("""
shape = (16, 3, 64, 64)
context.stack([np.zeros(shape[1:], "f4")] * 16)  # memory is there
keep_busy()
began = time.perf_counter()
wholes = [context.stack([np.full(shape[1:], batch, "f4")] * 16) for batch in range(8)]
padded = [context.pad([np.full(n + 1, batch, "i8") for n in range(32)], -1) for batch in range(8)]
print(f"8 stacks and 8 pads took {1000 * (time.perf_counter() - began):.1f} ms to launch, behind a busy card")
for batch, whole in enumerate(wholes):
    assert whole.device.type == "cuda" and whole.shape == shape
    assert (whole == batch).all(), batch
for batch, (whole, mask) in enumerate(padded):
    assert (whole[mask] == batch).all() and (whole[~mask] == -1).all(), batch
    assert mask.sum(1).tolist() == list(range(1, 33))
large = context.stack([np.ones(transfer.PINNED_BYTES // 4, "f4"), np.zeros(4 * (1 << 22), "f4")])
assert large[0].all() and not large[1].any()
print("arrived")
""")
    assert "arrived" in out


def test_an_error_of_forward_that_shows_in_the_copy_is_read_as_what_it_is() -> None:
    out = run("""
poisoned = torch.zeros(4, device=CARD)[torch.full((1,), 99, device=CARD)]
try:
    to_host([poisoned])
except BaseException as e:
    assert read_fault(e).kind is FaultKind.STICKY, repr(e)
    print("sticky", flush=True)
    os._exit(0)  # as a worker does: with a poisoned context the way out may abort
""")
    assert "sticky" in out


def test_what_it_gains_is_told() -> None:
    run("""
for what, count, size in (("1 result of 1.5 kB", 1, 384), ("32 of 1.5 kB", 32, 384), ("256 of 4 B", 256, 1), ("32 of 1 MiB", 32, 1 << 18), ("1 of 48 MiB", 1, 12 << 20)):
    tensors = [torch.randn(size, device=CARD) for _ in range(count)]
    tell(f"to_host, {what}", seconds(lambda: [t.cpu() for t in tensors]), seconds(lambda: to_host(tensors)))
for what, sample in (("images of 224 x 224, bytes", np.zeros((3, 224, 224), "u1")), ("the same, floats", np.zeros((3, 224, 224), "f4")), ("1 kB", np.zeros(256, "f4"))):
    samples = [sample] * 32
    def plain():
        return torch.from_numpy(np.stack(samples)).to(CARD)
    def both(do):
        return lambda: (do(), torch.cuda.synchronize())
    tell(f"stack, 32 {what}, until it is there", seconds(both(plain)), seconds(both(lambda: context.stack(samples))))
    tell(f"stack, 32 {what}, until the host goes on", seconds(plain), seconds(lambda: context.stack(samples)))
""")
