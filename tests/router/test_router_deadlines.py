"""The timing wheel."""

from __future__ import annotations

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from gpupool.router.deadlines import BUCKET_S, Deadlines
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant


class Watched(Request):
    """A request that a test can see die."""

    __slots__ = ("__weakref__",)


def request(deadline: float) -> Watched:
    return Watched(b"c", Tenant(), "i", 0, 0.0, deadline, (), 0)


def test_deadline_is_never_early_and_at_most_a_bucket_late() -> None:
    wheel = Deadlines()
    r = request(10.0)
    wheel.add(r)

    assert wheel.expired(9.9999) == []
    at = wheel.next()
    assert at is not None
    assert 10.0 <= at <= 10.0 + BUCKET_S + 1e-9
    assert wheel.expired(at) == [r]
    assert wheel.next() is None


def test_removed_request_is_kept_alive_by_nothing() -> None:
    wheel = Deadlines()
    r = request(1e6)
    wheel.add(r)
    seen = weakref.ref(r)

    wheel.remove(r)
    del r
    gc.collect()

    assert seen() is None
    assert wheel.next() is None


def test_removing_twice_is_no_error() -> None:
    wheel = Deadlines()
    r = request(1.0)
    wheel.add(r)

    wheel.remove(r)
    wheel.remove(r)

    assert len(wheel) == 0


def test_far_deadlines_leave_nothing_behind() -> None:
    wheel = Deadlines()
    for i in range(20_000):
        r = request(600_000.0 + i)
        wheel.add(r)
        wheel.remove(r)

    assert len(wheel._heap) < 200


@given(st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=50), st.lists(st.floats(0, 3), max_size=10))
def test_every_request_comes_out_once_in_time_unless_removed(entries: list[tuple[float, bool]], times: list[float]) -> None:
    wheel = Deadlines()
    requests = [request(deadline) for deadline, _ in entries]
    for r in requests:
        wheel.add(r)
    kept: set[Request] = set(requests)
    for r, (_, removed) in zip(requests, entries, strict=True):
        if removed:
            wheel.remove(r)
            kept.discard(r)

    for now in [*sorted(times), 10.0]:
        for due in wheel.expired(now):
            assert due.deadline <= now
            kept.remove(due)
        assert all(r.deadline > now - BUCKET_S - 1e-9 for r in kept)

    assert not kept
