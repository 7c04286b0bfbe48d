"""A request's body: msgpack and buffer frames to Python values and back, the same on a client and in a worker.

A tensor travels as the map `{"dtype", "shape", "data"}`; a map with exactly these three keys is one, any other map is just a map.
`data` holds the bytes themselves or the number of a buffer frame. What becomes of it in Python: see tensors.

A body may announce more than it holds and may cost far more memory than bytes (an empty map is one byte on the wire and 64 in
Python), so it is skimmed in C before anything is built, and large ones are counted while they are built.
Of a key that occurs twice in a map the last counts. Extension types and timestamps are refused. NaN and infinity pass unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import msgpack

from gpupool.errors import ErrorCode
from gpupool.tensors import SampleError, Tensor, check_tensor, from_numpy, from_torch, to_array
from gpupool.wire import MAX_BUFFERS

__all__ = ["SampleError", "Tensor", "pack_body", "unpack_body"]

MAX_DEPTH: Final = 32
#: Lists and maps in one body, and members of all of them together. Whoever has more numbers than that has a tensor. They bound
#: what a body can cost as Python objects to about 100 MB above its own size; below FREE_BYTES nothing can cost more than 6 MB.
MAX_CONTAINERS: Final = 100_000
MAX_MEMBERS: Final = 1_000_000
FREE_BYTES: Final = 64 * 1024
#: Tensor data from this size on travels in a buffer frame of its own, which nobody on the way has to copy.
BUFFER_BYTES: Final = 32 * 1024

_TENSOR_KEYS: Final = frozenset({"dtype", "shape", "data"})
_KEYS: Final = frozenset({str, int})
_SCALARS: Final = frozenset({str, int, float, bool, bytes, type(None)})


def pack_body(value: object) -> tuple[bytes, list[bytes]]:
    """Encode a sample, a list of samples, or a result: the body frame and the buffer frames.

    Takes what msgpack has, tuples (sent as lists), numpy arrays and scalars, torch tensors and `Tensor`.

    Raises:
        SampleError: with the path of what cannot travel: sets and other objects, integers beyond 64 bits, keys that are neither
            strings nor integers, nesting above MAX_DEPTH, more than MAX_CONTAINERS or MAX_MEMBERS.
    """
    packer = _Packer()
    prepared = packer.prepare(value, 1)
    try:
        body: bytes = msgpack.packb(prepared)
    except (OverflowError, ValueError, TypeError) as e:
        _blame(prepared, e)
    return body, packer.buffers


def unpack_body(body: bytes, buffers: Sequence[bytes]) -> object:
    """Decode a body with its buffer frames.

    Raises:
        SampleError: `bad_request` for broken or trailing bytes, a limit passed, or buffers missing, unused or used twice;
            `invalid_input` for a map that is no tensor although it has the keys of one.
    """
    try:
        value = _decode(body)
    except SampleError:
        raise
    except Exception as e:  # msgpack raises a dozen unrelated types on bad bytes; all mean the same here
        raise _refusal(f"body is not msgpack: {_reason(e)}") from None
    reader = _Reader(buffers)
    value = reader.revive(value, 1)
    if len(reader.used) != len(buffers):
        unused = next(n for n in range(len(buffers)) if n not in reader.used)
        raise _refusal(f"buffer {unused} of {len(buffers)} is used by no tensor")
    return value


def _decode(body: bytes) -> object:
    # A list of n members is allocated when its header is read, so nested headers that lie cost gigabytes. Skipping allocates
    # nothing and finds out whether everything announced is there (0.5 us).
    skimmer = msgpack.Unpacker(None, max_buffer_size=max(len(body), 1))
    skimmer.feed(body)
    skimmer.skip()
    if skimmer.tell() != len(body):
        raise _refusal(f"body has {len(body) - skimmer.tell()} bytes too many")
    if len(body) <= FREE_BYTES:
        return msgpack.unpackb(body, raw=False, strict_map_key=False)
    count = _Count()
    return msgpack.unpackb(
        body,
        raw=False,
        strict_map_key=False,
        max_array_len=MAX_MEMBERS,
        max_map_len=MAX_MEMBERS,
        object_hook=count,
        list_hook=count,
    )


class _Count:
    """Adds up lists and maps with their members, and stops the work at the limit."""

    def __init__(self) -> None:
        self.containers = 0
        self.members = 0

    def __call__(self, container: Any) -> Any:
        self.add(1, len(container))
        return container

    def add(self, containers: int, members: int) -> None:
        self.containers += containers
        self.members += members
        if self.containers > MAX_CONTAINERS or self.members > MAX_MEMBERS:
            limits = f"{MAX_CONTAINERS} lists and maps, or {MAX_MEMBERS} members in all"
            raise _refusal(f"more than {limits}: send many numbers as one tensor")


class _Reader:
    """Turns decoded msgpack into samples, in place: tensors made, types and depth checked."""

    def __init__(self, buffers: Sequence[bytes]) -> None:
        self.buffers = buffers
        self.used: set[int] = set()

    def revive(self, node: Any, depth: int) -> Any:
        """Check one value and what it holds; the same object comes back unless it is a tensor."""
        if type(node) in _SCALARS:
            return node
        if depth > MAX_DEPTH:
            raise _refusal(f"nested deeper than {MAX_DEPTH}")
        key: object = None
        try:
            if type(node) is dict:
                if len(node) == 3 and node.keys() == _TENSOR_KEYS:
                    return to_array(self.tensor(node))
                for key, value in node.items():
                    if type(key) not in _KEYS:
                        raise _refusal(f"a key is of type {type(key).__name__}; keys are strings or integers")
                    if type(value) not in _SCALARS:
                        node[key] = self.revive(value, depth + 1)
                return node
            if type(node) is list:
                for key, value in enumerate(node):
                    if type(value) not in _SCALARS:
                        node[key] = self.revive(value, depth + 1)
                return node
        except SampleError as e:
            raise (e.within(key) if type(key) in _KEYS else e) from None
        raise _refusal("extension types and timestamps are not accepted")

    def tensor(self, node: dict[str, Any]) -> Tensor:
        """Check a tensor map, with its data from the buffers where it names one."""
        data = node["data"]
        return check_tensor(node["dtype"], node["shape"], self.buffer(data) if type(data) is int else data)

    def buffer(self, number: int) -> bytes:
        """Hand out a buffer; once only, or one frame could be made into a thousand arrays."""
        if not 0 <= number < len(self.buffers):
            raise _refusal(f"there is no buffer {number}, the message has {len(self.buffers)}", "data")
        if number in self.used:
            raise _refusal(f"buffer {number} is used twice", "data")
        self.used.add(number)
        return self.buffers[number]


class _Packer:
    """Makes a value ready for msgpack: tensors into maps, numpy scalars into numbers; everything checked that msgpack lets by."""

    def __init__(self) -> None:
        self.buffers: list[bytes] = []
        self.count = _Count()
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # what was not imported cannot be in the value
        self.ndarray = getattr(numpy, "ndarray", ())
        self.generic = getattr(numpy, "generic", ())
        self.torch_tensor = getattr(torch, "Tensor", ())

    def prepare(self, node: Any, depth: int) -> Any:
        """Return what msgpack shall pack for this value: the very same object where nothing in it needs a change."""
        if type(node) in _SCALARS:
            return node
        key: object = None
        try:
            if isinstance(node, dict):
                self._enter(node, depth)
                if len(node) == 3 and node.keys() == _TENSOR_KEYS:
                    return self._tensor(check_tensor(**node))
                changed: dict[Any, Any] = {}
                for key, value in node.items():
                    if type(key) not in _KEYS:
                        raise SampleError(f"a key is of type {type(key).__name__}; keys are strings or integers")
                    if type(value) not in _SCALARS and (new := self.prepare(value, depth + 1)) is not value:
                        changed[key] = new
                return {**node, **changed} if changed else node
            if isinstance(node, (list, tuple)) and type(node) is not msgpack.ExtType:
                self._enter(node, depth)
                copy: list[Any] | None = None
                for key, value in enumerate(node):
                    if type(value) not in _SCALARS and (new := self.prepare(value, depth + 1)) is not value:
                        copy = list(node) if copy is None else copy
                        copy[key] = new
                return node if copy is None else copy
        except SampleError as e:
            raise (e.within(key) if type(key) in _KEYS else e) from None
        return self._leaf(node)

    def _enter(self, node: Any, depth: int) -> None:
        self.count(node)
        if depth > MAX_DEPTH:
            raise _refusal(f"nested deeper than {MAX_DEPTH}")

    def _leaf(self, node: Any) -> Any:
        if isinstance(node, self.ndarray):
            return self._tensor(from_numpy(node))
        if isinstance(node, self.torch_tensor):
            return self._tensor(from_torch(node))
        if isinstance(node, Tensor):
            return self._tensor(check_tensor(node.dtype, node.shape, node.data))
        if isinstance(node, self.generic):
            node = node.item()
        if isinstance(node, (str, int, float, bytes, bytearray, memoryview, type(None))):  # subclasses too: enums, numpy's own
            return node
        raise SampleError(f"a value of type {type(node).__name__} cannot be sent")

    def _tensor(self, tensor: Tensor) -> dict[str, Any]:
        data: bytes | int = tensor.data
        if len(tensor.data) >= BUFFER_BYTES and len(self.buffers) < MAX_BUFFERS:
            data = len(self.buffers)
            self.buffers.append(tensor.data)
        self.count.add(2, 3 + len(tensor.shape))  # the map and its shape
        return {"dtype": tensor.dtype, "shape": tensor.shape, "data": data}


def _blame(node: Any, cause: Exception) -> NoReturn:
    """Find which scalar msgpack refused; the search costs nothing until there is one."""
    members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    for key, value in members:
        try:
            msgpack.packb({key: value})
        except (OverflowError, ValueError, TypeError) as e:
            try:
                _blame(value, e)
            except SampleError as error:
                raise error.within(key) from None
    raise SampleError(f"cannot be sent: {_reason(cause)}")


def _refusal(message: str, field: str = "") -> SampleError:
    return SampleError(message, code=ErrorCode.BAD_REQUEST, field=field)


def _reason(e: Exception) -> str:
    """Name an error without repeating the bytes that caused it."""
    if isinstance(e, UnicodeError):
        return "text that is not valid UTF-8"
    return f"{type(e).__name__}: {e}"[:120] if str(e) else type(e).__name__
