"""Counts over restarts of workers."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.supervisor.tallies import Tallies


def counts(full: int, *sizes: int) -> dict[str, Any]:
    return {"closed": {"full": full}, "sizes": {"m": {"counts": list(sizes or (0, 0)), "samples": sum(sizes)}}}


def test_nothing_was_told() -> None:
    assert Tallies().total(0) == {}


def test_the_present_incarnation_goes_on_where_the_last_ended() -> None:
    tallies = Tallies()
    tallies.tell(0, 1, counts(3, 1, 2))
    tallies.tell(0, 1, counts(5, 2, 3))
    assert tallies.total(0) == counts(5, 2, 3)

    tallies.tell(0, 2, counts(1, 0, 1))

    assert tallies.total(0) == counts(6, 2, 4)
    assert tallies.total(1) == {}


def test_what_a_new_incarnation_has_not_counted_yet_stays() -> None:
    tallies = Tallies()
    tallies.tell(0, 1, counts(5))
    tallies.tell(0, 2, {})
    tallies.tell(0, 2, {"closed": {"min": 1}})

    assert tallies.total(0)["closed"] == {"full": 5, "min": 1}


def test_last_words_of_a_replaced_process_do_not_count_twice() -> None:
    tallies = Tallies()
    tallies.tell(0, 1, counts(5))
    tallies.tell(0, 2, counts(1))
    tallies.tell(0, 1, counts(6))

    assert tallies.total(0)["closed"] == {"full": 6}


def test_what_has_another_shape_is_left_out() -> None:
    tallies = Tallies()
    tallies.tell(0, 1, counts(5, 1, 2))
    tallies.tell(0, 2, {"closed": [1], "sizes": {"m": {"counts": [1], "samples": 1}}})

    assert tallies.total(0) == {"closed": {"full": 5}, "sizes": {"m": {"counts": [1, 2], "samples": 4}}}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(-5, 50)), max_size=60))
def test_totals_never_go_back(told: list[tuple[int, bool, int]]) -> None:
    tallies, incarnations, before = Tallies(), [1, 1, 1], [0, 0, 0]
    for slot, restarted, full in told:
        incarnations[slot] += restarted
        tallies.tell(slot, incarnations[slot], counts(max(0, full)))
        total = tallies.total(slot)["closed"]["full"]
        assert total >= before[slot]
        before[slot] = total


def test_the_same_told_again_counts_once_and_again_by_the_next_process() -> None:
    tallies = Tallies()
    for incarnation in (1, 2):
        for _ in range(3):
            tallies.tell(0, incarnation, counts(5, 1, 2))
    assert tallies.total(0) == counts(10, 2, 4)
