"""What is kept over a restart: there and back, and rubbish refused with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.kept import VERSION, Kept, KeptCard, KeptSlot, Unreadable, parse, render

CARD = KeptCard("quarantined", "XID 48", "reset", 48, "boot-1", 1e9, recovery_asked=True, gone=False)
FULL = Kept({"cpu:0": KeptSlot(held=True), "GPU-1": KeptSlot()}, {"GPU-1": CARD})

_NAMES = st.text(min_size=1, max_size=10)
_CARDS = st.builds(
    KeptCard, st.sampled_from(["quarantined", "lost"]), st.text(), st.text(), st.none() | st.integers(0, 999), st.text(),
    st.floats(0, 1e12), st.booleans(), st.booleans(),
)  # fmt: skip


@given(st.builds(Kept, st.dictionaries(_NAMES, st.builds(KeptSlot, st.booleans())), st.dictionaries(_NAMES, _CARDS)))
def test_what_is_written_is_read(kept: Kept) -> None:
    assert parse(render(kept)) == kept


def test_unknown_keys_of_a_newer_version_are_left() -> None:
    document = json.loads(render(FULL))
    document["cards"]["GPU-1"]["colour"] = "red"
    document["more"] = []
    assert parse(json.dumps(document).encode()) == FULL


def changed(**values: Any) -> bytes:
    document = json.loads(render(FULL))
    document["cards"]["GPU-1"] |= values
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"", "not JSON"),
        (b"\xff\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", f"version {VERSION}"),
        (b'{"version": 2}', f"version {VERSION}"),
        (b'{"version": 1, "slots": []}', "slots"),
        (b'{"version": 1, "slots": {"a": {"held": 1}}}', "slots.a.held: 1"),
        (b'{"version": 1, "cards": {"a": {}}}', "cards.a: needs a state"),
        (b'{"version": 1, "cards": {"a": null}}', "cards.a"),
        (changed(state="ok"), "cards.GPU-1: needs a state"),
        (changed(xid=True), "cards.GPU-1.xid"),
        (changed(since="yesterday"), "cards.GPU-1.since"),
        (changed(reason=None), "cards.GPU-1.reason"),
    ],
)
def test_rubbish_is_refused_and_its_place_named(data: bytes, where: str) -> None:
    with pytest.raises(Unreadable, match=where):
        parse(data)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse(data)
