"""Between host and card: a batch's results copied back with one wait, and its samples put together in pinned memory and sent on.

From and to pinned memory the card copies by itself, and whoever launched the copy goes on. All pinned memory here is torch's: each copy
gets a block of its own from the caching host allocator, which gives it out again only when nobody holds its tensor any more and the copies
that it has seen begin have ended. So results that wait to be encoded are safe from the next batch, and the next batch may be put together
while the last one is still on its way, without two buffers of our own that take turns.

The allocator rounds up to powers of two and keeps what it has. Hence a bound for the results of a batch and for each tensor of samples;
what is larger goes the plain way, through memory that can be swapped out, and waits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

#: Most pinned memory for the results of one batch, and for one tensor of samples.
PINNED_BYTES: Final = 64 << 20
_PLAIN: Final = frozenset({str, int, float, bool, bytes, type(None)})


def to_host(torch: Any, outputs: Any, *, pinned_bytes: int = PINNED_BYTES) -> Any:
    """Copy tensors on the card to host memory, also those in lists, tuples and dicts; all else stays as it is.

    All copies are launched before the one wait, but those that pass the bound or have no plain layout. They run on the current stream.
    """
    left = pinned_bytes

    def copy(value: Any) -> Any:
        nonlocal left
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if not value.is_cuda or value.layout is not torch.strided or value.nbytes > left:
                return value.cpu()
            left -= value.nbytes
            # A conjugate is a note on the tensor: taken along, it would be worked out on the host before the numbers are there.
            return value.resolve_conj().resolve_neg().to("cpu", non_blocking=True)  # which pins what it makes
        if kind is list or kind is tuple:
            return kind([copy(v) for v in value])
        return {k: copy(v) for k, v in value.items()} if kind is dict else value

    copied = copy(outputs)
    if left < pinned_bytes:
        torch.cuda.current_stream().synchronize()
    return copied


def stack(samples: Sequence[Any], device: str) -> Any:
    """Make one tensor on `device` of samples of equal shape and dtype, or a dict of tensors of dicts with equal keys.

    Samples are numpy arrays, tensors in host memory, numbers or lists of numbers.

    Raises:
        ValueError: naming the field, the sample and both shapes.
    """
    if samples and isinstance(samples[0], dict):
        return {name: _stack(column, device, f"field {name!r}: ") for name, column in _columns(samples).items()}
    return _stack(samples, device, "")


def pad(samples: Sequence[Any], device: str, value: float) -> tuple[Any, Any]:
    """Make one tensor on `device` of samples that differ in their first dimension, filled up with `value` to the longest.

    Returns it and a mask of (samples, longest), true where there is a sample.

    Raises:
        ValueError: naming the sample and both shapes.
    """
    import torch

    arrays = _arrays(samples)
    for n, array in enumerate(arrays):
        if not array.ndim:
            raise ValueError(f"sample {n} is a single number and has no length to fill up")
    _agree(arrays, 1)
    lengths = torch.tensor([len(array) for array in arrays])
    longest = int(lengths.max())
    whole = _buffer((len(arrays), longest, *arrays[0].shape[1:]), _dtype(arrays[0]), device).fill_(value)
    rows = whole if isinstance(arrays[0], torch.Tensor) else whole.numpy()
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    mask = _buffer((len(arrays), longest), torch.bool, device)
    torch.lt(torch.arange(longest), lengths[:, None], out=mask)
    return _send(whole, device), _send(mask, device)


def _stack(samples: Sequence[Any], device: str, where: str) -> Any:
    import torch

    arrays = _arrays(samples, where)
    _agree(arrays, 0, where)
    whole = _buffer((len(arrays), *arrays[0].shape), _dtype(arrays[0], where), device)
    if isinstance(arrays[0], torch.Tensor):
        torch.stack(arrays, out=whole)
    else:  # numpy takes arrays that torch does not: read-only ones, and those of negative strides or foreign byte order
        sys.modules["numpy"].stack(arrays, out=whole.numpy())
    return _send(whole, device)


def _columns(samples: Sequence[Any]) -> dict[Any, list[Any]]:
    names = samples[0].keys()
    for n, sample in enumerate(samples):
        if not isinstance(sample, dict) or sample.keys() != names:
            found = list(sample) if isinstance(sample, dict) else type(sample).__name__
            raise ValueError(f"sample {n} has the fields {found}, sample 0 has {list(names)}")
    return {name: [sample[name] for sample in samples] for name in names}


def _arrays(samples: Sequence[Any], where: str = "") -> list[Any]:
    """All of them as numpy arrays, where they are that, else all as tensors."""
    import torch

    if not samples:
        raise ValueError(f"{where}no samples")
    numpy = sys.modules.get("numpy")
    if numpy is not None and all(isinstance(sample, (numpy.ndarray, numpy.generic)) for sample in samples):
        return list(samples)
    arrays = []
    for n, sample in enumerate(samples):
        try:
            array = torch.as_tensor(sample)
        except (TypeError, ValueError, RuntimeError) as e:
            raise ValueError(f"{where}sample {n} cannot be made a tensor: {e}") from None
        if not array.is_cpu:
            raise ValueError(f"{where}sample {n} is on {array.device}, not in host memory")
        arrays.append(array.detach() if array.requires_grad else array)
    return arrays


def _agree(arrays: Sequence[Any], axis: int, where: str = "") -> None:
    """Refuse samples whose shape from `axis` on, or whose dtype, is not that of the first."""
    first = arrays[0]
    ndim, shape, dtype = first.ndim, first.shape[axis:], first.dtype
    for n, array in enumerate(arrays):
        if array.shape[axis:] != shape or array.dtype != dtype or array.ndim != ndim:
            found = f"shape {list(array.shape)} and dtype {array.dtype}"
            raise ValueError(f"{where}sample {n} has {found}, sample 0 has {list(first.shape)} and {dtype}")


def _dtype(array: Any, where: str = "") -> Any:
    import torch

    if isinstance(array, torch.Tensor):
        return array.dtype
    dtype = getattr(torch, array.dtype.name, None)
    if dtype is None:
        raise ValueError(f"{where}torch has no dtype {array.dtype.name}")
    return dtype


def _buffer(shape: Sequence[int], dtype: Any, device: str) -> Any:
    """Empty host memory, pinned where a card will copy from it."""
    import torch

    size = dtype.itemsize
    for length in shape:
        size *= length
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=pays_pinning(device, size))


def pays_pinning(device: str, size: int) -> bool:
    """Whether so many bytes go to that device through pinned memory."""
    return device.startswith("cuda") and 0 < size <= PINNED_BYTES


def _send(whole: Any, device: str) -> Any:
    return whole.to(device, non_blocking=pays_pinning(device, whole.nbytes))
