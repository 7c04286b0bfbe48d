"""Order, ageing and removal in the backlog."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.router.backlog import Backlog
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant

TENANT = Tenant()
NOW = 1000.0


@pytest.fixture(autouse=True)
def forget() -> None:
    """What the tenant had in another test's backlog counts no more."""
    TENANT.__init__()  # type: ignore[misc]


def request(sequence: int, arrived: float = 0.0, priority: int = 5, size: int = 10, rows: int = 1) -> Request:
    return Request(b"c", TENANT, str(sequence), sequence, arrived, arrived + 60.0, (), size, priority=priority, rows=rows)


def _take_last(backlog: Backlog, tenant: Tenant = TENANT) -> Request:
    last = backlog.last_of(tenant)
    backlog.remove(last)
    return last


def popped(backlog: Backlog) -> list[int]:
    return [backlog.pop(NOW).sequence for _ in range(len(backlog))]


def test_equals_leave_in_order_of_arrival() -> None:
    backlog = Backlog()
    for i in range(5):
        backlog.push(request(i, arrived=float(i)))

    assert popped(backlog) == [0, 1, 2, 3, 4]


def test_higher_priority_goes_first() -> None:
    backlog = Backlog()
    for i, priority in enumerate([0, 9, 5, 9]):
        backlog.push(request(i, priority=priority))

    assert popped(backlog) == [1, 3, 2, 0]


def test_waiting_a_step_weighs_as_much_as_one_priority() -> None:
    backlog = Backlog(ageing_s=1.0)
    backlog.push(request(0, arrived=0.0, priority=4))
    backlog.push(request(1, arrived=0.9, priority=5))
    backlog.push(request(2, arrived=1.1, priority=5))

    assert popped(backlog) == [1, 0, 2]


def test_lowest_priority_is_not_starved_by_a_stream_of_the_highest() -> None:
    backlog = Backlog(ageing_s=1.0)
    backlog.push(request(0, arrived=0.0, priority=0))
    served_after = None
    for i in range(1, 200):
        backlog.push(request(i, arrived=i * 0.1, priority=9))
        if backlog.pop(NOW).sequence == 0:
            served_after = i * 0.1
            break

    assert served_after == pytest.approx(9.1)


def test_restored_requests_stand_before_the_others_in_their_own_order() -> None:
    backlog = Backlog()
    for i in range(6):
        backlog.push(request(i))
    taken = [backlog.pop(NOW) for _ in range(3)]

    backlog.restore([taken[1], taken[2], taken[0]])

    assert popped(backlog) == [0, 1, 2, 3, 4, 5]


def test_last_is_the_youngest_of_the_lowest() -> None:
    backlog = Backlog()
    for i, priority in enumerate([5, 1, 1, 9]):
        backlog.push(request(i, priority=priority))

    assert [_take_last(backlog).sequence for _ in range(4)] == [2, 1, 0, 3]


def test_rows_ahead_are_those_of_equal_or_higher_priority() -> None:
    backlog = Backlog()
    for i, (priority, rows) in enumerate([(1, 100), (5, 10), (9, 1)]):
        backlog.push(request(i, priority=priority, rows=rows))

    assert [backlog.rows_ahead(TENANT, p) for p in (0, 5, 6, 9)] == [111, 11, 1, 1]
    assert backlog.rows == 111


def test_empty_backlog_has_nothing_to_take() -> None:
    with pytest.raises(IndexError):
        Backlog().pop(NOW)
    with pytest.raises(IndexError):
        Backlog().head()


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 20), st.booleans()), max_size=60))
def test_order_is_that_of_arrival_less_priority_and_counts_agree(entries: list[tuple[int, float, bool]]) -> None:
    TENANT.__init__()  # type: ignore[misc]
    backlog = Backlog(ageing_s=1.0)
    arrivals = sorted(e[1] for e in entries)
    requests = [request(i, arrived, e[0], size=i) for i, (arrived, e) in enumerate(zip(arrivals, entries, strict=True))]
    for r in requests:
        backlog.push(r)
    for r, entry in zip(requests, entries, strict=True):
        if entry[2]:
            backlog.remove(r)
    left = [r for r, e in zip(requests, entries, strict=True) if not e[2]]

    assert len(backlog) == len(list(backlog)) == len(left)
    assert backlog.size_bytes == sum(r.size for r in left)
    keys = [r.arrived - r.priority for r in (backlog.pop(NOW) for _ in left)]
    assert keys == sorted(keys)
    assert backlog.size_bytes == backlog.rows == 0
