"""The wire between router and worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool import link
from gpupool.link import INLINE_BYTES, Hello, LinkError, Marks, Result, Work, WorkFlag

frames = st.lists(st.binary(max_size=20) | st.sampled_from([b"x" * INLINE_BYTES, b"y" * (INLINE_BYTES + 1)]), max_size=4)
tickets = st.integers(0, (1 << 63) - 1)
works = st.builds(
    Work, ticket=tickets, model=st.integers(0, 9), flags=st.integers(0, 3), rows=st.integers(0, 65536),
    timeout_s=st.floats(0, 1e6), priority=st.integers(0, 9), frames=frames,
)  # fmt: skip
seconds = st.floats(0, 1e6)
marks = st.none() | st.builds(Marks, *[seconds] * 6, tickets, seconds, tickets, tickets, st.text(max_size=9))
results = st.builds(
    Result, ticket=tickets, code=st.sampled_from(["ok", "model_error"]), message=st.text(max_size=20), field=st.text(max_size=5),
    batch_size=st.integers(0, 64), length=st.integers(0, 512), queue_s=seconds, preprocess_s=seconds, forward_s=seconds,
    postprocess_s=seconds, started=st.booleans(), frames=frames, marks=marks,
)  # fmt: skip


@given(st.lists(works, max_size=6))
def test_work_is_read_back_as_packed(items: list[Work]) -> None:
    message = link.pack_work(items)

    assert message[0] == link.WORK
    assert link.unpack_work(message) == items


@given(st.lists(results, max_size=6))
def test_results_are_read_back_as_packed(items: list[Result]) -> None:
    message = link.pack_results(items)

    assert message[0] == link.RESULTS
    assert link.unpack_results(message) == items


def test_small_bodies_share_one_frame_and_large_ones_get_their_own() -> None:
    small = [Work(i, 0, WorkFlag.NONE, 1, 1.0, 5, [b"x" * INLINE_BYTES, b"y"]) for i in range(32)]
    large = Work(99, 0, WorkFlag.MANY, 4, 1.0, 5, [b"body", b"z" * (INLINE_BYTES + 1)])

    assert len(link.pack_work(small)) == 2
    assert len(link.pack_work([*small, large])) == 3


def test_hello_is_read_back_as_packed() -> None:
    hello = Hello(3, 7, 2, "token", 32, 4)

    assert link.unpack_hello(link.pack_hello(hello)) == hello


@pytest.mark.parametrize("kind", [link.WELCOME, link.CANCEL, link.BYE])
def test_ticket_lists_are_read_back_as_packed(kind: bytes) -> None:
    message = link.pack_tickets(kind, (1, 1 << 62))

    assert message[0] == kind
    assert link.unpack_tickets(message) == [1, 1 << 62]


Unpack = Callable[[Sequence[bytes]], object]
READERS: list[Unpack] = [link.unpack_hello, link.unpack_work, link.unpack_results, link.unpack_tickets]


@pytest.mark.parametrize("unpack", READERS)
@given(frames=st.lists(st.binary(max_size=40), max_size=3))
def test_random_frames_raise_link_errors_only(unpack: Unpack, frames: list[bytes]) -> None:
    try:
        unpack([b"K", *frames])
    except LinkError as e:
        assert str(e)


@pytest.mark.parametrize("unpack", READERS)
@pytest.mark.parametrize("value", [None, 1, {}, "text", [None], [[]], [[1]], ["a"], [{}], [[1] * 7], [[1] * 12]], ids=repr)
def test_messages_of_another_shape_are_refused(unpack: Unpack, value: Any) -> None:
    with pytest.raises(LinkError):
        unpack([b"K", msgpack.packb(value)])


@pytest.mark.parametrize("reference", [0, 5, -3, "x", None])
def test_body_that_points_at_no_frame_is_refused(reference: Any) -> None:
    row = [1, 0, 0, 1, 1.0, 5, [reference]]

    with pytest.raises(LinkError):
        link.unpack_work([link.WORK, msgpack.packb([row])])
