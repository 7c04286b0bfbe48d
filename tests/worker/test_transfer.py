"""Stacking and padding with real torch on the CPU; in which order results leave a card, on pretended tensors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from gpupool.worker import transfer
from gpupool.worker.models import Context

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

CONTEXT = Context("cpu", {}, "", None, 1)


@pytest.mark.parametrize(
    "samples",
    [
        [np.float32([[1, 2]]), np.float32([[3, 4]])],
        [np.arange(6, dtype="uint8").reshape(2, 3)[:, ::-1], np.zeros((2, 3), "uint8")],
        [np.frombuffer(b"\1\0\0\0", "<i4"), np.frombuffer(b"\2\0\0\0", "<i4")],
        [np.array([1, 2], ">i8"), np.array([3, 4], ">i8")],
        [np.zeros((0, 4), "float64")] * 2,
        [np.float32(1), np.float32(2)],
        [np.array(True), np.array(False)],
        [torch.ones(2, 2), torch.zeros(2, 2).t()],
        [torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)],
        [torch.ones(2, requires_grad=True), torch.zeros(2)],
        [np.float32([1]), torch.zeros(1)],
        [[1, 2], [3, 4]],
        [1.5, 2.5],
    ],
    ids=str,
)
def test_stacked_samples_are_those_that_were_given(samples: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = CONTEXT.stack(samples)

    assert whole.shape == (len(samples), *np.shape(samples[0]))
    assert not whole.requires_grad
    for row, sample in zip(whole, samples, strict=True):
        assert row.tolist() == (sample.tolist() if hasattr(sample, "tolist") else sample)


def test_a_stack_keeps_the_dtype_and_shares_no_memory_with_its_samples() -> None:
    sample = np.float32([1, 2])
    whole = CONTEXT.stack([sample])
    sample[0] = 9

    assert (whole.dtype, whole.tolist()) == (torch.float32, [[1, 2]])


def test_maps_become_a_map_of_tensors() -> None:
    whole = CONTEXT.stack([{"x": np.float32([1]), "n": 2}, {"n": 3, "x": np.float32([4])}])

    assert {name: tensor.tolist() for name, tensor in whole.items()} == {"x": [[1.0], [4.0]], "n": [2, 3]}


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "no samples"),
        ([np.zeros(2), np.zeros(2), np.zeros(3)], r"sample 2 has shape \[3\] and dtype float64, sample 0 has \[2\]"),
        ([np.zeros(2), np.zeros((2, 1))], r"sample 1 has shape \[2, 1\]"),
        ([np.zeros(2, "f4"), np.zeros(2)], "sample 1 .* dtype float64, .* float32"),
        ([torch.zeros(2), torch.zeros(1)], r"sample 1 has shape \[1\] and dtype torch.float32"),
        ([[1, 2], [3]], r"sample 1 has shape \[1\]"),
        ([[1, 2], "text"], "sample 1 cannot be made a tensor"),
        ([[1], [[1], [2, 3]]], "sample 1 cannot be made a tensor"),
        ([None], "sample 0 cannot be made a tensor"),
        ([np.array(["a"]), np.array(["b"])], "torch has no dtype str"),
        ([torch.zeros(1), torch.zeros(1, device="meta")], "sample 1 is on meta"),
        ([{"x": [1]}, {"y": [1]}], r"sample 1 has the fields \['y'\], sample 0 has \['x'\]"),
        ([{"x": [1]}, [1]], "sample 1 has the fields list"),
        ([{"x": [1], "y": [1]}, {"x": [1], "y": [1, 2]}], r"field 'y': sample 1 has shape \[2\]"),
    ],
)
def test_samples_that_do_not_go_together_are_refused_by_number_and_shape(samples: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CONTEXT.stack(samples)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_padding_fills_up_to_the_longest_and_the_mask_tells_where(kind: Any) -> None:
    whole, mask = CONTEXT.pad([kind([1, 2, 3]), kind([4])], 7)

    assert (whole.tolist(), whole.dtype) == ([[1, 2, 3], [4, 7, 7]], torch.int64)
    assert (mask.tolist(), mask.dtype) == ([[True, True, True], [True, False, False]], torch.bool)


def test_padding_concerns_the_first_dimension_only() -> None:
    whole, mask = CONTEXT.pad([np.ones((1, 2), "f4"), np.ones((3, 2), "f4"), np.ones((0, 2), "f4")])

    assert whole.shape == (3, 3, 2)
    assert whole.sum((1, 2)).tolist() == [2, 6, 0]
    assert mask.sum(1).tolist() == [1, 3, 0]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "no samples"),
        ([np.zeros((2, 3)), np.zeros((1, 4))], r"sample 1 has shape \[1, 4\] .* sample 0 has \[2, 3\]"),
        ([[1], 2], "sample 1 is a single number"),
        ([[1], [2.5]], "dtype torch.float32"),
        ([{"x": [1]}], "sample 0 cannot be made a tensor"),
    ],
)
def test_samples_that_cannot_be_padded_together_are_refused(samples: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CONTEXT.pad(samples)


@pytest.mark.parametrize(
    ("device", "size", "pinned"),
    [
        ("cuda:0", 1, True),
        ("cuda:0", transfer.PINNED_BYTES, True),
        ("cuda:0", transfer.PINNED_BYTES + 1, False),
        ("cuda:0", 0, False),
        ("cpu", 1, False),
    ],
)
def test_what_goes_to_a_card_is_pinned_up_to_the_bound(device: str, size: int, pinned: bool) -> None:
    assert transfer.pays_pinning(device, size) is pinned


def test_whoever_neither_stacks_nor_pads_does_not_import_torch() -> None:
    code = "import sys, gpupool.worker.device, gpupool.worker.models, gpupool.worker.execute; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "False"


class OnCard:
    """A tensor on a pretended card that notes what becomes of it."""

    def __init__(self, log: list[str], name: str, nbytes: int, *, layout: str = "strided", is_cuda: bool = True) -> None:
        self.log, self.name, self.nbytes, self.layout, self.is_cuda = log, name, nbytes, layout, is_cuda

    def detach(self) -> OnCard:
        return self

    resolve_conj = resolve_neg = detach

    def cpu(self) -> str:
        self.log.append(f"{self.name} plainly")
        return self.name

    def to(self, device: str, *, non_blocking: bool) -> str:
        assert (device, non_blocking) == ("cpu", True)
        self.log.append(f"{self.name} launched")
        return self.name


@pytest.fixture
def log() -> list[str]:
    return []


def card(log: list[str]) -> Any:
    stream = SimpleNamespace(synchronize=lambda: log.append("wait"))
    return SimpleNamespace(Tensor=OnCard, strided="strided", cuda=SimpleNamespace(current_stream=lambda: stream))


def test_all_copies_are_launched_before_the_one_wait_and_all_else_stays(log: list[str]) -> None:
    a, b, c = (OnCard(log, name, 10) for name in "abc")
    text = object()
    outputs = [{"x": a, "n": 1}, (b, [c]), None, text]

    assert transfer.to_host(card(log), outputs) == [{"x": "a", "n": 1}, ("b", ["c"]), None, text]
    assert log == ["a launched", "b launched", "c launched", "wait"]


def test_pinned_memory_of_a_batch_has_a_bound_and_the_rest_is_copied_plainly(log: list[str]) -> None:
    outputs = [OnCard(log, "a", 6), OnCard(log, "b", 5), OnCard(log, "c", 4)]

    assert transfer.to_host(card(log), outputs, pinned_bytes=10) == ["a", "b", "c"]
    assert log == ["a launched", "b plainly", "c launched", "wait"]


def test_nothing_is_waited_for_where_nothing_was_launched(log: list[str]) -> None:
    outputs = [OnCard(log, "a", 6, layout="sparse"), OnCard(log, "b", 6, is_cuda=False), OnCard(log, "c", 11), 5]

    assert transfer.to_host(card(log), outputs, pinned_bytes=10) == ["a", "b", "c", 5]
    assert log == ["a plainly", "b plainly", "c plainly"]
