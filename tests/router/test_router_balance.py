"""Choice among workers."""

from __future__ import annotations

import pytest

from gpupool.link import Hello
from gpupool.router.balance import HALF_LIFE_S, Balance, Policy, Reading, apply_readings
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant
from gpupool.router.workers import Fleet, Worker

TENANT = Tenant()


def fleet_of(*rows: int, limit: int = 32) -> Fleet:
    fleet = Fleet(100, 1 << 20)
    for slot, count in enumerate(rows):
        worker = Worker(b"%d" % slot, Hello(slot, 1, 1, "", limit))
        worker.proven = True
        fleet.add(worker)
        if count:
            give(worker, count)
    return fleet


def give(worker: Worker, rows: int) -> None:
    request = Request(b"c", TENANT, "i", 0, 0.0, 1.0, (), 0, rows=rows)
    request.ticket = len(worker.outstanding) + 1
    worker.give(request)


def picks(fleet: Fleet, policy: Policy, count: int) -> list[int]:
    balance = Balance(policy)
    balance.begin(fleet.usable)
    chosen = []
    for _ in range(count):
        worker = balance.best()
        if worker is None:
            break
        give(worker, 1)
        balance.given(worker)
        chosen.append(worker.slot)
    return chosen


@pytest.mark.parametrize("policy", list(Policy))
def test_equal_workers_get_equal_shares(policy: Policy) -> None:
    assert sorted(picks(fleet_of(0, 0, 0), policy, 9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_shortest_queue_levels_the_queues() -> None:
    assert picks(fleet_of(3, 0, 1), Policy.SHORTEST_QUEUE, 5).count(0) == 0


def test_round_robin_looks_at_nothing_but_room() -> None:
    assert picks(fleet_of(30, 0), Policy.ROUND_ROBIN, 6).count(0) == 3


def test_nobody_is_chosen_when_nobody_has_room() -> None:
    assert picks(fleet_of(64, 64), Policy.SHORTEST_WAIT, 1) == []


def test_choice_ends_with_the_room() -> None:
    assert len(picks(fleet_of(0, 0, limit=2), Policy.SHORTEST_WAIT, 100)) == 8


def test_queue_bound_limits_the_room_of_large_batches() -> None:
    fleet = Fleet(max_queue=10, room_bytes=1 << 20)
    worker = Worker(b"w", Hello(0, 1, 1, "", 64))
    worker.proven = True
    fleet.add(worker)

    assert worker.room == 74
    fleet.set_max_queue(1000)
    assert worker.room == 128


def test_small_differences_of_cost_are_none() -> None:
    fleet = fleet_of(0, 0)

    apply_readings(fleet, [Reading(0, 1, 0, 32, 0.0100), Reading(1, 1, 0, 32, 0.0140)], 0.0)

    assert fleet.by_slot[0].service_s == fleet.by_slot[1].service_s


def test_unknown_cost_is_the_mean_of_the_others() -> None:
    fleet = fleet_of(0, 0, 0)

    apply_readings(fleet, [Reading(0, 1, 0, 32, 0.01), Reading(1, 1, 0, 32, 0.03)], 0.0)

    assert fleet.by_slot[2].service_s == pytest.approx(0.02)


def test_absurdly_cheap_worker_does_not_attract_all_traffic() -> None:
    fleet = fleet_of(0, 0)

    apply_readings(fleet, [Reading(0, 1, 0, 32, 1e-9), Reading(1, 1, 0, 32, 0.1)], 0.0)

    assert picks(fleet, Policy.SHORTEST_WAIT, 27).count(1) >= 3


@pytest.mark.parametrize(
    "reading",
    [
        Reading(0, 7, 0, 1, 1e-6),
        Reading(0, 1, 1 << 23, 0, 0.0),
        Reading(0, 1, 0, 1 << 60, 1e12),
    ],
    ids=["other incarnation", "absurd queue", "absurd limit and cost"],
)
def test_stale_or_absurd_record_changes_nothing(reading: Reading) -> None:
    fleet = fleet_of(5, 5)
    before = [(w.rows, w.room, w.batch_limit) for w in fleet.by_slot.values()]

    apply_readings(fleet, [reading], 0.0)

    assert [(w.rows, w.room, w.batch_limit) for w in fleet.by_slot.values()] == before
    assert fleet.by_slot[0].reported == 0
    assert fleet.by_slot[0].service_s == fleet.by_slot[1].service_s


def test_board_raises_the_load_and_never_lowers_it() -> None:
    fleet = fleet_of(4, 4)

    apply_readings(fleet, [Reading(0, 1, 20, 32, 0.0), Reading(1, 1, 0, 32, 0.0)], 0.0)

    assert picks(fleet, Policy.SHORTEST_QUEUE, 10) == [1] * 10
    assert fleet.by_slot[1].rows == 14


def test_batch_limit_on_the_board_sets_the_room() -> None:
    fleet = fleet_of(0)

    apply_readings(fleet, [Reading(0, 1, 0, 4, 0.0)], 0.0)

    assert fleet.by_slot[0].room == 8


def test_a_cost_that_nothing_confirms_fades_so_that_one_slow_batch_is_not_for_ever() -> None:
    fleet = fleet_of(0, 0)
    readings = [Reading(0, 1, 0, 32, 0.002), Reading(1, 1, 0, 32, 0.200)]
    fleet.by_slot[0].answered_at = 100.0
    fleet.by_slot[1].answered_at = 100.0

    apply_readings(fleet, readings, 100.0)
    assert set(picks(fleet, Policy.SHORTEST_WAIT, 4)) == {0}

    fleet.by_slot[0].answered_at = 100.0 + 10 * HALF_LIFE_S
    apply_readings(fleet, readings, 100.0 + 10 * HALF_LIFE_S)
    assert 1 in picks(fleet, Policy.SHORTEST_WAIT, 4)


def test_a_worker_whose_batch_is_overdue_is_passed_over_until_it_ends() -> None:
    fleet = fleet_of(0, 0)
    balance = Balance(Policy.SHORTEST_WAIT)
    slow, other = fleet.by_slot[0], fleet.by_slot[1]
    slow.batch_s = other.batch_s = 0.010
    other.turn = 1  # it would be the other's turn last

    def first(running_s: float) -> Worker | None:
        apply_readings(fleet, [Reading(0, 1, 0, 32, 0.01, running_s), Reading(1, 1, 0, 32, 0.01, 0.005)], 0.0)
        balance.begin(fleet.by_slot.values())
        return balance.best()

    assert first(0.012) is slow
    assert first(1.0) is other
    assert first(-5.0) is slow
    assert first(1e9) is slow  # absurd: told by nobody who knows
    assert first(0.0) is slow


def test_nothing_is_overdue_where_no_batch_is_known() -> None:
    fleet = fleet_of(0, 0)
    apply_readings(fleet, [Reading(0, 1, 0, 32, 0.01, 1.0), Reading(1, 1, 0, 32, 0.01)], 0.0)

    assert [w.overdue_s for w in fleet.by_slot.values()] == [0.0, 0.0]
