"""The fuzz targets, driven by hypothesis for a moment: bytes of all sorts, and msgpack that is right or nearly so."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.messages import LIES, MESSAGES, VALUES, Good, Message, spoilt
from fuzz.targets import TARGETS

PACKED = VALUES.map(msgpack.packb)
ANY = st.one_of(st.binary(max_size=300), LIES, PACKED, spoilt().map(lambda bad: bad.frames[0]))
SEVERAL = st.lists(ANY, min_size=1, max_size=4).map(b"\xc1".join)


def frames(message: Message) -> bytes:
    if isinstance(message, Good):
        return b"\xc1".join([msgpack.packb({"v": 1, "id": "g", **message.header}), msgpack.packb(message.body)])
    return b"\xc1".join(message.frames)


MANY = st.lists(MESSAGES.map(frames), max_size=12).map(b"\xc1\xc1".join)


@pytest.mark.parametrize("name", ["header", "reply", "rows", "link", "body"])
@settings(max_examples=300, deadline=None)
@given(data=ANY | SEVERAL)
def test_parsers_refuse_or_read_whatever_comes(name: str, data: bytes) -> None:
    TARGETS[name](data)


@settings(max_examples=200, deadline=None)
@given(data=MANY | SEVERAL)
def test_the_router_core_keeps_its_books_whatever_comes(data: bytes) -> None:
    TARGETS["core"](data)
