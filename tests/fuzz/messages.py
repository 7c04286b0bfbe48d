"""Messages for a router, as hypothesis draws them: good ones, good ones spoilt a little, and plain bytes.

A good message is made so that only one answer is right; it carries a number by which its reply is known. All others may be answered or not,
but never twice, never in another's name, and never at anybody's cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgpack
from hypothesis import strategies as st

#: Ids of good requests begin so; no other message may use it.
GOOD: Final = "good-"
_SCALARS: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.binary(max_size=40),
)
VALUES: Final = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=12
)
#: Lists, maps, texts and bytes that announce far more than follows; reserved and extension bytes; deep nesting.
LIES: Final = st.sampled_from(
    [
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01",
        b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc1", b"\xd4\x01\x00", b"\x91" * 33 + b"\x01", b"\x91" * 1100, b"\x81\x01" * 200,
        b"\xdd\x00\x01\x00\x00" * 12, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95.", b"",
    ]
)  # fmt: skip
#: Values of the wrong type or size for each key of a header.
WRONG: Final[dict[str, st.SearchStrategy[Any]]] = {
    "v": st.sampled_from([0, 2, -1, "1", None, 1.0, True, [], 2**63]),
    "id": st.sampled_from(["", b"", 7, 1.5, [], {}, "x" * 65, b"x" * 65, "\U0001f600" * 17, True, "x" * 3000]),
    "type": st.sampled_from(["", "explode", 1, None, [], "INFER", b"infer"]),
    "model": st.sampled_from(["", "nobody", 1, [], "x" * 129, b"toy"]),
    "version": st.sampled_from(["", "0", 1, [], "x" * 129]),
    "timeout_ms": st.sampled_from([0, -1, 1.5, "100", True, 2**63, []]),
    "priority": st.sampled_from([-1, 10, 5.0, "5", True, []]),
    "many": st.sampled_from([0, 1, "yes", None, []]),
    "retry": st.sampled_from([0, 1, "no", None, []]),
    "key": st.sampled_from([1, [], "x" * 300, b"k"]),
    "trace": st.sampled_from([1, [], "x" * 300]),
}


@dataclass(frozen=True, slots=True)
class Good:
    """A request whose one right answer is known: its body back."""

    body: Any
    header: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bad:
    """Frames that are no good request, or a cancel."""

    frames: list[bytes]


Message = Good | Bad


def _plain(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def _header(**more: Any) -> bytes:
    return _plain({"v": 1, "id": "odd", **more})


@st.composite
def spoilt(draw: st.DrawFn) -> Bad:
    """A good message with one thing wrong."""
    kind = draw(st.sampled_from(["key", "cut", "flip", "more", "lie", "frames", "large header", "many", "trailing"]))
    body = _plain(draw(VALUES))
    match kind:
        case "key":
            key = draw(st.sampled_from(sorted(WRONG)))
            return Bad([_header(**{key: draw(WRONG[key])}), body])
        case "cut":
            header = _header(timeout_ms=1000)
            return Bad(
                draw(st.sampled_from([[header[: draw(st.integers(0, len(header)))], body], [header, body[: len(body) // 2]]]))
            )
        case "flip":
            flipped = bytearray(_header(priority=3, pad="x" * 20))
            flipped[draw(st.integers(0, len(flipped) - 1))] ^= 1 << draw(st.integers(0, 7))
            return Bad([bytes(flipped), body])
        case "more":
            return Bad([_header(), body, *draw(st.lists(st.binary(max_size=20), min_size=1, max_size=300))])
        case "lie":
            lie = draw(LIES)
            return Bad(
                draw(st.sampled_from([[lie], [lie, body], [_header(), lie], [_header(many=True), lie], [lie, lie, lie]]))
            )
        case "frames":
            return Bad(
                draw(
                    st.sampled_from([[_header()], [b""], [b"", b""], [b"", _header(), body, b""], [b"", b"", _header(), body]])
                )
            )
        case "large header":
            return Bad([_header(pad="x" * draw(st.integers(4000, 10_000))), body])
        case "many":
            return Bad([_header(many=True), body])
        case _:
            return Bad([_header() + b"\x01", body + b"\x01"])


CANCELS: Final = st.one_of(st.sampled_from(["odd", "nobody", 1, None]), st.integers(0, 30).map(lambda n: f"{GOOD}{n}")).map(
    lambda name: Bad([_plain({"v": 1, "type": "cancel", "id": name})])
)
BYTES: Final = st.lists(st.one_of(st.binary(max_size=100), LIES), min_size=1, max_size=6).map(Bad)
GOODS: Final = st.builds(
    Good,
    VALUES.filter(lambda value: _comes_back(value)),
    st.fixed_dictionaries(
        {}, optional={"priority": st.integers(0, 9), "retry": st.booleans(), "many": st.just(value=False), "new key": VALUES}
    ),
)


def _comes_back(value: Any) -> bool:
    """Whether a value is what a model may return just so: NaN is not equal to itself, and a tensor's map is no plain map."""
    return value == value and not _has(value, lambda v: isinstance(v, float) and v != v) and not _has(value, _is_tensor)  # noqa: PLR0124


def _has(value: Any, wanted: Callable[[Any], bool]) -> bool:
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else []
    return wanted(value) or any(_has(one, wanted) for one in inner)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"dtype", "shape", "data"}


MESSAGES: Final[st.SearchStrategy[Message]] = st.one_of(GOODS, spoilt(), BYTES, CANCELS)
