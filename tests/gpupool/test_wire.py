"""Headers and frames of the client protocol."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool import wire
from gpupool.errors import ErrorCode
from gpupool.wire import Header, WireError, parse_header, parse_reply, row_count


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def test_version_alone_is_a_header() -> None:
    assert parse_header(packed({"v": 1})) == Header()


def test_all_fields_are_read_and_unknown_ones_ignored() -> None:
    fields: dict[str, Any] = {
        "type": "infer", "id": "x", "model": "m", "version": "2", "timeout_ms": 5, "priority": 9, "many": True, "key": "k",
        "retry": False, "trace": "t",
    }  # fmt: skip

    assert parse_header(packed({"v": 1, **fields, "novelty": [1, {"a": None}]})) == Header(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("v", 2),
        ("v", None),
        ("v", True),
        ("v", "1"),
        ("v", 1.0),
        ("type", "train"),
        ("type", 7),
        ("type", ["infer"]),
        ("id", ""),
        ("id", b""),
        ("id", "x" * 65),
        ("id", "é" * 33),
        ("id", b"x" * 65),
        ("id", 7),
        ("id", ["a"]),
        ("id", True),
        ("timeout_ms", 0),
        ("timeout_ms", -1),
        ("timeout_ms", 1.5),
        ("timeout_ms", True),
        ("timeout_ms", "5"),
        ("timeout_ms", wire.MAX_TIMEOUT_MS + 1),
        ("timeout_ms", (1 << 64) - 1),
        ("priority", -1),
        ("priority", 10),
        ("priority", "high"),
        ("many", 1),
        ("retry", 0),
        ("model", "m" * 129),
        ("model", b"m"),
        ("version", 1),
        ("key", "k" * 257),
        ("trace", 1),
    ],
)
def test_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(WireError) as caught:
        parse_header(packed({"v": 1, "id": "mine", field: value}))

    assert caught.value.code is ErrorCode.BAD_REQUEST
    assert caught.value.field == field
    assert caught.value.request_id == (None if field == "id" else "mine")
    assert field in caught.value.message


@pytest.mark.parametrize("request_id", ["x", "x" * 64, "é" * 32, b"\x00", b"x" * 64])
def test_ids_up_to_the_limit_are_taken_unchanged(request_id: str | bytes) -> None:
    assert parse_header(packed({"v": 1, "id": request_id})).id == request_id


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x93\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 200 + b"\x00",
        b"\x91" * 1100 + b"\x00",
        b"\x07",
        packed([1, 2]),
        packed({"v": 1}) + b"\x00",
        b"\x81\xa1v",
        b"\x81\xa1\xff\x01",
        b"\x80\x04\x95\x15\x00\x00\x00\x00\x00\x00\x00.",
        packed({"v": 1, "pad": "x" * 4096}),
    ],
    ids=[
        "empty",
        "reserved",
        "http",
        "cut",
        "array bomb",
        "map bomb",
        "bin bomb",
        "nested 200",
        "nested 1100",
        "integer",
        "list",
        "trailing",
        "cut map",
        "bad utf-8",
        "pickle",
        "too long",
    ],
)
def test_what_is_no_header_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError) as caught:
        parse_header(frame)

    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_refusal_does_not_repeat_what_a_peer_sent() -> None:
    with pytest.raises(WireError) as caught:
        parse_header(packed({"v": 1, "priority": "drop\ntable"}))

    assert "drop" not in caught.value.message


def test_of_duplicate_keys_the_last_counts() -> None:
    assert parse_header(b"\x83\xa1v\x01\xa8priority\x02\xa8priority\x03").priority == 3


def test_header_of_the_limit_is_taken() -> None:
    frame = packed({"v": 1, "pad": "x" * (wire.MAX_HEADER_BYTES - len(packed({"v": 1, "pad": "x" * 4000})) + 4000)})

    assert len(frame) == wire.MAX_HEADER_BYTES
    assert parse_header(frame) == Header()


@given(st.binary(max_size=200))
def test_random_bytes_raise_wire_errors_only(frame: bytes) -> None:
    try:
        header = parse_header(frame)
    except WireError as e:
        assert e.message
    else:
        assert header.type in wire.TYPES


@given(
    st.dictionaries(
        st.sampled_from([*Header.__dataclass_fields__, "v", "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_any_map_raises_wire_errors_only(fields: dict[str, Any]) -> None:
    try:
        parse_header(packed({"v": 1, **fields}))
    except WireError as e:
        assert e.message


headers = st.builds(
    Header,
    type=st.sampled_from(wire.TYPES),
    id=st.none() | st.text(min_size=1, max_size=16).filter(lambda t: "\ud800" > max(t)) | st.binary(min_size=1, max_size=64),
    model=st.none() | st.text("abc", max_size=128),
    version=st.none() | st.text("123.", max_size=128),
    timeout_ms=st.none() | st.integers(1, wire.MAX_TIMEOUT_MS),
    priority=st.integers(0, 9),
    many=st.booleans(),
    key=st.none() | st.text("k", max_size=256),
    retry=st.booleans(),
    trace=st.none() | st.text("0-", max_size=55),
)


@given(headers)
def test_what_is_packed_is_read_back(header: Header) -> None:
    fields = {name: getattr(header, name) for name in Header.__dataclass_fields__}

    assert parse_header(wire.pack_request(fields)) == header


def test_delimiter_is_told_from_the_header() -> None:
    assert wire.split_delimiter([b"", b"h", b"b"]) == (True, [b"h", b"b"])
    assert wire.split_delimiter([b"h", b""]) == (False, [b"h", b""])
    assert wire.split_delimiter([]) == (False, [])
    assert wire.split_delimiter([b""]) == (False, [b""])
    assert wire.split_delimiter([b"", b""]) == (False, [b"", b""])


def test_reply_keeps_its_fields_and_leaves_out_what_is_none() -> None:
    frame = wire.pack_reply(request_id=b"\x01", code="overloaded", message="full", retryable=True, retry_after_ms=5, field=None)

    assert parse_reply(frame) == {
        "v": 1, "id": b"\x01", "code": "overloaded", "message": "full", "retryable": True, "retry_after_ms": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", packed([1]), packed({"v": 1}), packed({"v": 2, "code": "ok"}), packed({"v": 1, "code": 0})]
)
def test_what_is_no_reply_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        parse_reply(frame)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300, 65535, 65536])
def test_rows_are_counted_from_the_first_bytes(count: int) -> None:
    assert row_count(packed([0] * count)) == count


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", ErrorCode.BAD_REQUEST),
        (b"\x07", ErrorCode.BAD_REQUEST),
        (packed({"a": 1}), ErrorCode.BAD_REQUEST),
        (b"\xdc\x00", ErrorCode.BAD_REQUEST),
        (b"\xdd\x00\x00\x00", ErrorCode.BAD_REQUEST),
        (b"\xdc\xff\xff", ErrorCode.BAD_REQUEST),
        (b"\xdd\xff\xff\xff\xff", ErrorCode.TOO_LARGE),
        (packed([0] * 65537), ErrorCode.TOO_LARGE),
    ],
)
def test_rows_that_cannot_be_are_refused(body: bytes, code: ErrorCode) -> None:
    with pytest.raises(WireError) as caught:
        row_count(body)

    assert caught.value.code is code
    assert caught.value.field == "many"


@pytest.mark.parametrize("field", list(Header.__dataclass_fields__))
def test_nil_is_the_same_as_absent(field: str) -> None:
    assert wire.parse_header(msgpack.packb({"v": 1, field: None})) == Header()
