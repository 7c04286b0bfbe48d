"""Who may be in preprocess, and who alone: no thread, no lock."""

from __future__ import annotations

from gpupool.worker.solitude import Solitude


def inside(threads: int) -> Solitude:
    solitude = Solitude()
    for _ in range(threads):
        solitude.enter()
    return solitude


def test_any_number_is_inside_at_a_time_while_nobody_wants_to_be_alone() -> None:
    solitude = inside(3)

    assert solitude.open
    assert not solitude.vacant


def test_who_wants_to_be_alone_waits_for_those_inside_and_nobody_enters_meanwhile() -> None:
    solitude = inside(3)
    solitude.want()
    assert not solitude.open
    assert not solitude.vacant

    solitude.leave()
    assert not solitude.vacant
    solitude.leave()
    assert solitude.vacant
    assert not solitude.open


def test_several_are_alone_one_after_the_other_and_then_it_is_open_again() -> None:
    solitude = inside(3)
    for _ in range(3):
        solitude.want()

    for left in (2, 1, 0):
        assert solitude.vacant
        solitude.begin()
        assert not solitude.vacant
        assert not solitude.open
        solitude.leave()
        assert solitude.open == (left == 0)


def test_who_waits_no_longer_holds_up_nobody() -> None:
    solitude = inside(2)
    solitude.want()
    solitude.forgo()
    assert solitude.open
    solitude.leave()
    assert solitude.vacant
