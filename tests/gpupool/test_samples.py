"""Bodies: what goes in comes out, what cannot travel is named by its path, and hostile bytes stay cheap."""

from __future__ import annotations

import enum
import math
import struct
import subprocess
import sys
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool import samples, tensors
from gpupool.errors import ErrorCode
from gpupool.samples import SampleError, Tensor, pack_body, unpack_body


def there_and_back(value: object) -> Any:
    return unpack_body(*pack_body(value))


def refusal(body: bytes, buffers: list[bytes] | None = None) -> SampleError:
    with pytest.raises(SampleError) as caught:
        unpack_body(body, buffers or [])
    return caught.value


def unsendable(value: object) -> SampleError:
    with pytest.raises(SampleError) as caught:
        pack_body(value)
    return caught.value


keys = st.text(max_size=5) | st.integers(-(2**63), 2**64 - 1)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=5) | st.dictionaries(keys, v, max_size=5), max_leaves=20)


@given(values)
@settings(max_examples=200)
def test_plain_values_come_back_the_same(value: object) -> None:
    assert repr(there_and_back(value)) == repr(value)  # repr tells NaN, -0.0 and True from 1 apart


@given(st.binary(max_size=200), st.lists(st.binary(max_size=8), max_size=2))
@settings(max_examples=300)
def test_any_bytes_give_a_value_or_a_sample_error(body: bytes, buffers: list[bytes]) -> None:
    try:
        unpack_body(body, buffers)
    except SampleError as e:
        assert e.code in (ErrorCode.BAD_REQUEST, ErrorCode.INVALID_INPUT)
        assert e.message


def test_body_cut_anywhere_is_a_bad_request() -> None:
    body, _ = pack_body({"text": "hello", "numbers": [1, 2.5, None], "x": np.arange(3)})
    for end in range(len(body)):
        assert refusal(body[:end]).code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80\x80",  # trailing bytes
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xa2\xff\xff",  # not UTF-8
        b"\xd6\xff\x00\x00\x00\x01",  # timestamp
        b"\x91\xd6\xff\x00\x00\x00\x01",
        b"\xc7\x00\x01",  # extension type
        b"\x81\x90\x01",  # a list as key
        b"\x81\xc0\x01",  # nil as key
        b"\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01",  # NaN as key
        b"\x81\xc4\x01a\x01",  # bytes as key
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 200 + b"\xc0",
        b"\x91" * 1100 + b"\xc0",
        b"\x81\xa1a" * 200 + b"\xc0",
    ],
)
def test_broken_body_is_a_bad_request(body: bytes) -> None:
    assert refusal(body).code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd" + struct.pack(">I", 4_000_000) + b"\x80" * 4_000_000,
        b"\x93" + (b"\xdd" + struct.pack(">I", 500_000) + b"\x80" * 500_000) * 3,
        (b"\xdd" + struct.pack(">I", 4_000_000)) * 30 + b"\xc0" * 4_000_000,
        b"\x9f" + (b"\xdd" + struct.pack(">I", 120_000) + b"\xa2ab" * 120_000) * 15,
    ],
    ids=["many maps in one list", "many maps in three", "headers that lie", "many small strings"],
)
def test_amplifying_body_is_refused_cheaply(body: bytes) -> None:
    tracemalloc.start()
    error = refusal(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.code is ErrorCode.BAD_REQUEST
    assert peak < 120_000_000


def test_counts_are_the_same_on_both_ends() -> None:
    most = [[] for _ in range(samples.MAX_CONTAINERS - 1)]  # type: list[object]
    assert there_and_back(most) == most
    assert unsendable([*most, []]).code is ErrorCode.BAD_REQUEST
    assert refusal(msgpack.packb([*most, []])).code is ErrorCode.BAD_REQUEST
    assert "as one tensor" in unsendable([0] * (samples.MAX_MEMBERS + 1)).message


def test_nesting_up_to_the_limit_passes_both_ways() -> None:
    value: object = "x"
    for _ in range(samples.MAX_DEPTH):
        value = [value]
    assert there_and_back(value) == value
    assert unsendable([value]).code is ErrorCode.BAD_REQUEST
    assert refusal(msgpack.packb([value])).code is ErrorCode.BAD_REQUEST


def test_last_of_two_equal_keys_counts() -> None:
    assert unpack_body(b"\x82\xa1a\x01\xa1a\x02", []) == {"a": 2}


@pytest.mark.parametrize("name", sorted(tensors.ITEM_BYTES.keys() - {"bfloat16"}))
@pytest.mark.parametrize("count", [6, 60_000])
def test_numpy_arrays_of_every_dtype_come_back(name: str, count: int) -> None:
    array = np.arange(count).astype(name).reshape(2, 3, -1)
    back = there_and_back({"a": array})["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    back[0, 0, 0] = 1  # writable: models may work in place


def test_large_arrays_travel_as_buffers_and_small_ones_inline() -> None:
    body, buffers = pack_body([np.zeros(8192, "float32"), np.zeros(4, "float32"), np.ones(9000, "float32")])
    assert [len(b) for b in buffers] == [32768, 36000]
    assert len(body) < 200


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.arange(12, dtype="f4").reshape(3, 4).T,
        np.arange(24, dtype="f8").reshape(2, 3, 4)[:, ::-2],
        np.asfortranarray(np.arange(12, dtype="f2").reshape(3, 4)),
        np.array(3, "f4"),
        np.zeros((0, 3), "i8"),
        np.array([1.5, np.nan, np.inf, -np.inf]),
    ],
    ids=["big-endian", "transposed", "strided", "fortran", "no dimensions", "empty", "nan"],
)
def test_memory_layout_does_not_change_values(array: np.ndarray[Any, Any]) -> None:
    back = there_and_back(array)
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(back, array, equal_nan=array.dtype.kind == "f")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "complex64"])
def test_torch_tensors_come_out_as_numpy_arrays(dtype: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)).T
    assert np.array_equal(there_and_back(tensor), tensor.numpy())


def test_bfloat16_comes_out_as_exact_float32() -> None:
    tensor = torch.tensor([1.0, -2.5, 3.140625, math.inf], dtype=torch.bfloat16).requires_grad_()
    back = there_and_back({"y": tensor})["y"]
    assert back.dtype == np.float32
    assert back.tolist() == [1.0, -2.5, 3.140625, math.inf]
    assert msgpack.unpackb(pack_body(tensor)[0])["dtype"] == "bfloat16"


def test_conjugate_views_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert there_and_back(tensor).tolist() == [1 - 2j]


class Color(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(1.5), 1.5),
        (np.float64(2.5), 2.5),
        (np.int64(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("s"), "s"),
        ((1, (2, 3)), [1, [2, 3]]),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        (Color.RED, 3),
    ],
)
def test_values_close_to_plain_ones_arrive_as_plain_ones(value: object, expected: object) -> None:
    back = there_and_back({"v": value})["v"]
    assert back == expected
    assert type(back) is type(expected)


def test_special_floats_pass_unchanged() -> None:
    back = there_and_back([math.nan, math.inf, -math.inf, np.float32("nan")])
    assert [str(v) for v in back] == ["nan", "inf", "-inf", "nan"]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": {1, 2}}, "a"),
        ({"a": [0, object()]}, "a[1]"),
        ({"images": [{"data": 2**64}]}, "images[0].data"),
        ([{"x": -(2**63) - 1}], "[0].x"),
        ({"t": "\ud800"}, "t"),
        ({"a": {(1, 2): 3}}, "a"),
        ({"a": {b"k": 3}}, "a"),
        ({"a": {True: 3}}, "a"),
        ({"a": msgpack.ExtType(1, b"")}, "a"),
        ({"a": msgpack.Timestamp(1)}, "a"),
        ({"a": 1j}, "a"),
        ({"a": np.datetime64("2020")}, "a"),
        ({"a": np.array(["x"])}, "a"),
        ({"a": np.array([object()])}, "a"),
        ({"a": torch.zeros(2).to_sparse()}, "a"),
        ({"a": torch.zeros(2, device="meta")}, "a"),
        ({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, "a"),
        ({"a": Tensor("float32", (2,), b"123")}, "a.data"),
        ({"a": {"dtype": "float32", "shape": [1], "data": 0}}, "a.data"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(value: object, field: str) -> None:
    error = unsendable(value)
    assert error.field == field
    assert error.code in (ErrorCode.INVALID_INPUT, ErrorCode.BAD_REQUEST)


def test_packing_leaves_the_callers_value_alone() -> None:
    array = np.zeros(3)
    value = {"a": [array, {"b": array}], "c": (array,)}
    pack_body(value)
    assert value["a"][0] is array
    assert value["c"] == (array,)


def tensor_map(**changes: object) -> bytes:
    packed: bytes = msgpack.packb({"t": [{"dtype": "float32", "shape": [1, 2], "data": bytes(8), **changes}]})
    return packed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "float31"}, "dtype"),
        ({"dtype": 4}, "dtype"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"shape": 2}, "shape"),
        ({"shape": [-1, -2]}, "shape"),
        ({"shape": [1.0, 2]}, "shape"),
        ({"shape": [True, 2]}, "shape"),
        ({"shape": [1] * 33}, "shape"),
        ({"shape": [2**62, 2**62, 0], "data": b""}, "shape"),
        ({"shape": [2**40, 2**40]}, "data"),
        ({"data": bytes(7)}, "data"),
        ({"data": bytes(9)}, "data"),
        ({"data": "12345678"}, "data"),
        ({"data": None}, "data"),
    ],
)
def test_wrong_tensor_map_is_invalid_input_with_the_part_at_fault(changes: dict[str, object], field: str) -> None:
    error = refusal(tensor_map(**changes))
    assert error.code is ErrorCode.INVALID_INPUT
    assert error.field == f"t[0].{field}"


def test_map_with_another_key_is_just_a_map() -> None:
    value = {"dtype": "float31", "shape": [1], "data": b"", "more": 1}
    assert there_and_back(value) == value


def test_bool_bytes_other_than_one_count_as_true() -> None:
    back: Any = unpack_body(msgpack.packb({"dtype": "bool", "shape": [3], "data": b"\x00\x01\x07"}), [])
    assert back.tolist() == [False, True, True]
    assert back.sum() == 2


@pytest.mark.parametrize(
    ("data", "buffers", "words"),
    [
        ([0], [], "no buffer 0"),
        ([-1], [bytes(4)], "no buffer -1"),
        ([1], [bytes(4)], "no buffer 1"),
        ([0, 0], [bytes(4)], "used twice"),
        ([0], [bytes(4), bytes(4)], "buffer 1 of 2 is used by no tensor"),
    ],
)
def test_every_buffer_is_used_exactly_once(data: list[int], buffers: list[bytes], words: str) -> None:
    body = msgpack.packb([{"dtype": "float32", "shape": [1], "data": n} for n in data])
    error = refusal(body, buffers)
    assert error.code is ErrorCode.BAD_REQUEST
    assert words in str(error)


def test_more_large_arrays_than_frames_go_inline() -> None:
    arrays = [np.full(8192, n, "float32") for n in range(260)]
    body, buffers = pack_body(arrays)
    assert len(buffers) == 256
    back: Any = unpack_body(body, buffers)
    assert [a[0] for a in back] == list(range(260))


def test_without_numpy_tensors_come_out_as_tensor_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_numpy", lambda: None)
    tensor = Tensor("int16", (2,), b"\x01\x00\x02\x00")
    assert there_and_back({"t": tensor}) == {"t": tensor}


def test_importing_samples_loads_neither_numpy_nor_torch() -> None:
    code = "import sys, gpupool.samples as s; s.pack_body({'a': 1}); print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
