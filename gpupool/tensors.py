"""A tensor's plain form on the wire, dtype, shape and bytes, and its ways from and to numpy and torch.

Neither library is needed or imported by force: arrays come out as numpy's where numpy is installed and as `Tensor` where it is not.
numpy has no bfloat16, so those come out as float32, which holds every bfloat16 exactly.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any, Final

from gpupool.errors import ErrorCode

MAX_DIMS: Final = 32
#: Bytes per element of each dtype that may travel; names as numpy and torch have them.
ITEM_BYTES: Final = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


class SampleError(Exception):
    """A value that cannot travel.

    Attributes:
        message: what is wrong, with the limit if one was passed.
        code: `bad_request` (not msgpack, above a limit) or `invalid_input` (a wrong tensor, or a type that cannot be sent).
        field: the path to the value at fault, such as "pixels" or "images[3].data"; "" means the whole body.
    """

    def __init__(self, message: str, *, code: ErrorCode = ErrorCode.INVALID_INPUT, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def within(self, key: object) -> SampleError:
        """Put the key of the container that the value stands in before the path."""
        step = f"[{key}]" if type(key) is int else str(key)[:64]
        joint = "." if self.field and not self.field.startswith("[") else ""
        self.field = f"{step}{joint}{self.field}"
        return self


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array for those who have no numpy: little-endian elements in C order. `Tensor("float32", (2, 3), data)`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def check_tensor(dtype: Any, shape: Any, data: Any) -> Tensor:
    """Make a Tensor of values from anywhere, exact to the byte.

    Raises:
        SampleError: `invalid_input`, with "dtype", "shape" or "data" as its field.
    """
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        shown = repr(dtype) if type(dtype) is str and len(dtype) <= 32 else type(dtype).__name__
        raise SampleError(f"unknown dtype {shown}; known are {', '.join(ITEM_BYTES)}", field="dtype")
    if type(shape) not in (list, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise SampleError("a shape is a list of integers that are not negative", field="shape")
    if len(shape) > MAX_DIMS:
        raise SampleError(f"{len(shape)} dimensions, the limit is {MAX_DIMS}", field="shape")
    if type(data) is not bytes:
        raise SampleError(f"expected bytes or the number of a buffer, got {type(data).__name__}", field="data")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if len(data) != expected:
        size = expected if expected < 1 << 63 else "too many"
        raise SampleError(f"{dtype} of shape {list(shape)} takes {size} bytes, got {len(data)}", field="data")
    return Tensor(dtype, tuple(shape), data)


def to_array(tensor: Tensor) -> object:
    """Make a writable numpy array, or give the tensor back where numpy is not installed; raises SampleError."""
    np = _numpy()
    if np is None:
        return tensor
    if tensor.dtype == "bfloat16":
        wide = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        flat = wide.view("<f4")
    elif tensor.dtype == "bool":  # a byte that is neither 0 nor 1 breaks numpy's own arithmetic
        flat = np.frombuffer(tensor.data, "u1") != 0
    else:
        flat = np.frombuffer(tensor.data, np.dtype(tensor.dtype).newbyteorder("<")).copy()
    try:
        return flat.reshape(tensor.shape)
    except ValueError as e:  # an empty array whose other dimensions overflow numpy's sizes
        raise SampleError(str(e)[:200], field="shape") from None


@functools.cache  # a failed import searches the whole path each time
def _numpy() -> Any:
    try:
        import numpy  # noqa: ICN001 - a client without numpy gets the Tensor, one that sees no tensor never pays
    except ImportError:
        return None
    return numpy


def from_numpy(array: Any) -> Tensor:
    """Copy an array of any byte order and layout; raises SampleError for dtypes that do not travel."""
    dtype = array.dtype
    if dtype.name not in ITEM_BYTES:
        raise SampleError(f"an array of dtype {dtype.name} cannot be sent")
    if dtype.newbyteorder("<") != dtype:
        array = array.astype(dtype.newbyteorder("<"))
    return Tensor(dtype.name, array.shape, array.tobytes())


def from_torch(tensor: Any) -> Tensor:
    """Copy a tensor from any device; raises SampleError for dtypes and layouts that do not travel."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES or str(tensor.layout) != "torch.strided" or tensor.is_meta:
        raise SampleError(f"a tensor of dtype {dtype}, layout {tensor.layout} on {tensor.device} cannot be sent")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = tensor.numel() * tensor.element_size()
    # By address: numpy knows no bfloat16, and torch works without numpy.
    data = (ctypes.c_char * size).from_address(tensor.data_ptr()).raw if size else b""
    return Tensor(dtype, tuple(tensor.shape), data)
