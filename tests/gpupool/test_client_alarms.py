"""Which open calls are due: against a plain table, and with a bound on what is left behind."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gpupool.client.alarms import Alarms

IDS = st.sampled_from("abcde")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), IDS, st.integers(0, 20)),
        st.tuples(st.just("remove"), IDS, st.just(0)),
        st.tuples(st.just("due"), st.just(""), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_call_is_due_once_at_its_last_instant(steps: list[tuple[str, str, int]]) -> None:
    alarms, table = Alarms(), dict[str, int]()
    for step, call_id, at in steps:
        if step == "set":
            alarms.set(call_id, at)
            table[call_id] = at
        elif step == "remove":
            alarms.remove(call_id)
            table.pop(call_id, None)
        else:
            due = alarms.due(at)
            assert due == sorted(due, key=lambda i: (table[i], i))
            assert set(due) == {i for i, instant in table.items() if instant <= at}
            for call_id in due:
                del table[call_id]
        assert alarms.next() == min(table.values(), default=math.inf)


def test_what_is_put_off_or_removed_does_not_pile_up() -> None:
    alarms = Alarms()
    for n in range(10_000):
        alarms.set("always", n % 7)
        alarms.set(str(n), 1e6 + n)
        alarms.remove(str(n))
        assert len(alarms._heap) < 100

    for n in range(10_000):
        alarms.set(str(n), 1e6 + n)
    for n in range(10_000):
        alarms.remove(str(n))
    assert len(alarms._heap) < 100
