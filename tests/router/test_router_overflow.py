"""Overflow workers: what they get, when, and that they are no capacity."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.link import WorkFlag
from gpupool.router.balance import Reading
from gpupool.router.pressure import HOLD_S, RELEASE_S
from support.router_world import CLIENT, RouterWorld

MAIN, SPARE = 0, 7


def full_world(count: int = 20, **options: Any) -> RouterWorld:
    """A main worker that is full, an overflow worker that is not, and a full backlog."""
    world = RouterWorld(overflow=1, max_pending=20, **options)
    world.join(MAIN, batch_limit=2)
    world.join(SPARE, batch_limit=4)
    for n in range(4 + count):
        world.ask(f"r{n}", timeout_ms=60_000)
    return world


def press(world: RouterWorld, seconds: float = HOLD_S + 0.2) -> None:
    """Let so much time pass, in the small steps of a router at work."""
    for _ in range(round(seconds / 0.1)):
        world.advance(0.1)


def spare(world: RouterWorld) -> list[Any]:
    return world.ids(b"w7.1")


def test_nothing_goes_there_as_long_as_there_is_no_pressure() -> None:
    world = full_world(17)
    press(world, 10.0)
    assert not spare(world)


def test_a_burst_that_is_soon_over_does_not_go_there() -> None:
    world = full_world()
    press(world, HOLD_S / 2)
    for _ in range(6):
        world.answer(b"w0.1")
    press(world, 5.0)
    assert not spare(world)


def test_under_pressure_the_oldest_go_there_one_batch_at_a_time() -> None:
    world = full_world()

    press(world)

    assert spare(world) == ["r4", "r5", "r6", "r7"]
    assert world.core.stats(world.now)["overflowed_total"] == 4
    assert world.core.stats(world.now)["pressure"] is True


def test_of_the_least_important_first() -> None:
    world = RouterWorld(overflow=1, max_pending=20)
    world.join(MAIN, batch_limit=2)
    world.join(SPARE, batch_limit=4)
    for n in range(24):
        world.ask(f"r{n}", priority=2 if n in (15, 20) else 5, timeout_ms=60_000)

    press(world)

    assert spare(world) == ["r15", "r20", *[r for r in ("r4", "r5", "r6") if r not in world.ids(b"w0.1")][:2]]


def test_replies_are_marked_and_others_are_not() -> None:
    world = full_world()
    press(world)

    world.answer(b"w7.1")
    world.answer(b"w0.1")

    assert world.header("r4")["overflow"] is True
    assert world.header("r4")["worker"] == SPARE
    assert "overflow" not in world.header("r0")


def test_what_cannot_be_done_there_in_time_stays() -> None:
    world = full_world()
    press(world)
    world.answer(b"w7.1", forward_s=100.0, batch_size=4)

    press(world)

    assert not spare(world)


def test_it_stops_when_the_pressure_is_over() -> None:
    world = full_world()
    press(world)
    for _ in range(5):
        world.answer(b"w0.1")
    taken = spare(world)
    press(world, RELEASE_S + 0.3)
    world.answer(b"w7.1")

    assert len(taken) == 4
    assert not spare(world)
    assert world.core.stats(world.now)["pressure"] is False


def test_bytes_count_too() -> None:
    world = RouterWorld(overflow=1, max_pending_bytes=1 << 20, max_message_bytes=1 << 20)
    world.join(MAIN, batch_limit=1)
    world.join(SPARE)
    for n in range(14):
        world.ask(f"r{n}", body=b"\xc4" * 90_000, timeout_ms=60_000)

    press(world)

    assert spare(world)


def test_memory_of_the_devices_counts_as_the_supervisor_tells_it() -> None:
    world = full_world(3)
    press(world, 3.0)
    assert not spare(world)

    world.core.workers.overflow.memory = 0.95
    press(world)

    assert spare(world) == ["r4", "r5", "r6"]


def test_predicted_time_counts_against_the_target_delay() -> None:
    world = full_world(10, target_delay_ms=1000.0)
    world.answer(b"w0.1", world.tickets(b"w0.1")[:2], forward_s=0.5, batch_size=2)
    world.core.workers.observe([Reading(MAIN, 1, 4, 2, 0.25)], world.now)

    press(world)

    assert spare(world)


def test_refusing_for_time_is_pressure_though_the_backlog_is_short() -> None:
    world = full_world(6, target_delay_ms=0.0)
    world.answer(b"w0.1", world.tickets(b"w0.1")[:2], forward_s=5.0, batch_size=2)
    world.core.workers.observe([Reading(MAIN, 1, 4, 2, 2.5)], world.now)
    for n in range(15):
        world.ask(f"late{n}", timeout_ms=1000)
        world.advance(0.1)
    assert world.codes("late0") == ["overloaded"]

    # The backlog itself is a third full: what was refused a moment ago is what counts.
    assert spare(world)


def test_a_suspect_never_goes_there() -> None:
    world = full_world()
    world.join(1, batch_limit=2)
    first = world.tickets(b"w0.1")[:2]
    world.lose(MAIN, running=first)

    press(world)

    assert not set(spare(world)) & {"r0", "r1"}
    assert all(not request.deaths for peer, requests in world.sent if peer == b"w7.1" for request in requests)


def test_death_of_an_overflow_worker_sends_its_work_to_the_others_and_retry_false_runs_once() -> None:
    world = RouterWorld(overflow=1, max_pending=20)
    world.join(MAIN, batch_limit=2)
    world.join(SPARE, batch_limit=4)
    for n in range(24):
        world.ask(f"r{n}", retry=n != 5, timeout_ms=60_000)
    press(world)
    assert spare(world) == ["r4", "r5", "r6", "r7"]

    world.lose(SPARE, running=world.tickets(b"w7.1")[:2])
    for _ in range(20):
        world.answer(b"w0.1")

    assert world.codes("r5") == ["worker_lost"]
    assert all(world.codes(f"r{n}") == ["ok"] for n in range(24) if n != 5)
    assert world.header("r4")["worker"] == MAIN
    assert "overflow" not in world.header("r4")


def test_the_flood_goes_there_and_not_who_is_calm() -> None:
    world = full_world()
    world.ask("calm", client=b"calm", timeout_ms=60_000)

    press(world)

    assert "calm" not in spare(world)


def test_overflow_workers_are_no_capacity() -> None:
    world = RouterWorld(overflow=1)
    world.core.workers.expect(0, 0)
    world.join(SPARE)

    world.ask("a")

    assert world.codes("a") == ["no_workers"]
    assert not world.core.workers.fleet.usable


def test_a_hold_holds_and_all_mains_held_means_drained() -> None:
    world = full_world()
    world.core.workers.hold(SPARE)
    press(world)
    assert not spare(world)
    assert {"t": "idle", "slot": SPARE} in world.told

    world.core.workers.release(SPARE)
    press(world)
    assert spare(world)
    world.core.workers.hold(MAIN)
    world.ask("late")
    assert world.codes("late") == ["draining"]


def test_its_slowness_says_nothing_about_the_others() -> None:
    """Were it in the mean, no difference between cards would be left."""
    world = RouterWorld(overflow=1)
    for slot in (0, 1, SPARE):
        world.join(slot)

    world.core.workers.observe(
        [Reading(0, 1, 0, 32, 0.001), Reading(1, 1, 0, 32, 0.004), Reading(SPARE, 1, 0, 32, 1.0)], world.now
    )

    costs = {w.slot: w.service_s for w in world.core.workers.fleet.by_slot.values()}
    assert costs[1] == pytest.approx(4 * costs[0])


def test_an_urgent_mark_of_an_earlier_try_does_not_go_along() -> None:
    world = full_world()
    for request in world.core.ledger.backlog:
        request.flags |= WorkFlag.URGENT
    press(world)
    assert all(not r.flags & WorkFlag.URGENT for r in world.held[b"w7.1"].values())


def test_without_overflow_workers_nothing_changes() -> None:
    world = RouterWorld(max_pending=20)
    world.join(MAIN, batch_limit=2)
    for n in range(24):
        world.ask(f"r{n}", timeout_ms=60_000)
    press(world)
    assert world.core.ledger.pending == 20
    world.ask("more")
    assert world.codes("more") == ["overloaded"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ask", "wait", "main", "spare", "lose"]), st.integers(0, 9)), max_size=120))
def test_books_balance_and_everybody_is_answered_once(deeds: list[tuple[str, int]]) -> None:
    world = RouterWorld(overflow=1, max_pending=8)
    world.join(MAIN, batch_limit=2)
    world.join(SPARE, batch_limit=2)
    asked, incarnation = 0, 1
    for deed, n in deeds:
        peer = f"w7.{incarnation}".encode()
        match deed:
            case "ask":
                for _ in range(n):
                    asked += 1
                    world.ask(f"r{asked}", priority=n, client=b"c%d" % (n % 2), timeout_ms=5000)
            case "wait":
                press(world, n / 5)
            case "main":
                world.answer(b"w0.1", world.tickets(b"w0.1")[:n])
            case "spare":
                world.answer(peer, world.tickets(peer)[:n])
            case "lose":
                world.lose(SPARE, incarnation, running=world.tickets(peer)[:1])
                incarnation += 1
                world.join(SPARE, incarnation, batch_limit=2)
        assert len(world.held[f"w7.{incarnation}".encode()]) <= 2
    press(world, 6.0)
    assert all(len(headers) == 1 for headers in world.replies.values())
    assert sum(map(len, world.replies.values())) == asked
    assert CLIENT not in {client for client, _ in world.replies}
