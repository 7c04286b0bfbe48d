"""The core's decisions about workers: who gets what, and what becomes of work that comes back."""

from __future__ import annotations

from typing import Any

import pytest

from gpupool import wire
from gpupool.link import Hello, Result, WorkFlag
from gpupool.router.balance import Reading
from support.router_world import TOKEN, RouterWorld


def test_work_for_one_worker_travels_in_one_message() -> None:
    world = RouterWorld()
    peer = world.join()

    for i in range(10):
        world.ask(f"r{i}", step=False)
    world.step()

    assert [(p, len(requests)) for p, requests in world.sent] == [(peer, 10)]


def test_worker_holds_two_batches_and_the_rest_waits() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=4)

    for i in range(20):
        world.ask(f"r{i}")

    assert len(world.held[peer]) == 8
    assert world.core.ledger.pending == 12
    world.answer(peer, world.tickets(peer)[:3])
    assert len(world.held[peer]) == 8


def test_worker_just_joined_gets_a_small_batch_until_it_has_answered() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=32, proven=False)

    for i in range(100):
        world.ask(f"r{i}", step=False)
    world.step()
    assert len(world.held[peer]) == 8
    world.answer(peer, world.tickets(peer)[:1])

    assert len(world.held[peer]) == 64


def test_high_priority_overtakes_what_waits() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=1)
    for i in range(5):
        world.ask(f"low{i}", priority=1)

    world.ask("high", priority=9)
    world.answer(peer, world.tickets(peer)[:1])

    assert world.ids(peer)[-1] == "high"


def test_equal_workers_take_turns() -> None:
    world = RouterWorld()
    peers = [world.join(slot) for slot in range(3)]

    for i in range(9):
        world.ask(f"r{i}")
        for peer in peers:
            if world.held[peer]:
                world.answer(peer)

    slots = [world.header(f"r{i}")["worker"] for i in range(9)]
    assert sorted(slots) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_hello_is_welcomed_and_told() -> None:
    world = RouterWorld()

    peer = world.join(2, 5)

    assert world.welcomed == [peer]
    assert world.told == [{"t": "joined", "slot": 2, "incarnation": 5}]


@pytest.mark.parametrize(
    "hello",
    [
        Hello(0, 1, 1, "guess", 32),
        Hello(0, 1, 2, TOKEN, 32),
        Hello(8, 1, 1, TOKEN, 32),
        Hello(-1, 1, 1, TOKEN, 32),
        Hello(3, 4, 1, TOKEN, 32),
    ],
    ids=["token", "epoch", "slot too high", "slot below zero", "dead incarnation"],
)
def test_stranger_is_not_welcomed(hello: Hello) -> None:
    world = RouterWorld()
    world.lose(3, 4)

    world.core.workers.hello(b"x", hello, world.now)
    world.step()

    assert not world.welcomed
    assert not world.core.workers.fleet.by_slot
    assert world.events == ["hello_refused"]


def test_worker_that_connects_anew_keeps_its_work() -> None:
    world = RouterWorld()
    peer = world.join()
    world.ask("a")
    world.held[b"other"] = world.held.pop(peer)

    world.core.workers.hello(b"other", Hello(0, 1, 1, TOKEN, 32), world.now)
    world.answer(b"other")

    assert world.codes() == ["ok"]
    assert world.core.workers.fleet.by_slot[0].rows == 0


def test_next_incarnation_takes_over_even_before_the_death_is_told() -> None:
    world = RouterWorld()
    world.join(0, 1)
    world.ask("a")

    peer = world.join(0, 2)
    world.lose(0, 1)
    world.answer(peer)

    assert world.codes() == ["ok"]


def test_late_hello_of_a_dead_incarnation_does_not_bury_the_living_one() -> None:
    """Messages of two senders have no order: a router that stood still may read the older process's last."""
    world = RouterWorld()
    peer = world.join(0, 2)

    world.core.workers.hello(b"older", Hello(0, 1, 1, TOKEN, 32), world.now)
    world.step()
    world.lose(0, 1)
    world.ask("a")
    world.answer(peer)

    assert world.codes() == ["ok"]
    assert world.core.workers.fleet.by_slot[0].incarnation == 2
    assert "hello_refused" in world.events


def test_queue_of_a_dead_worker_goes_back_in_front_and_in_order() -> None:
    world = RouterWorld()
    world.core.workers.expect(0, 1)
    world.join(batch_limit=2)
    for i in range(6):
        world.ask(f"r{i}")

    world.lose(0, running=())
    peer = world.join(0, 2, batch_limit=32)

    assert world.ids(peer) == [f"r{i}" for i in range(6)]
    world.answer(peer)
    assert all(world.header(f"r{i}")["attempts"] == 1 for i in range(6))
    assert world.core.stats(0.0)["redispatched_total"] == {"crash": 4}


def test_death_without_blame_makes_no_suspects_but_counts_as_an_attempt() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("a")
    running = world.tickets(b"w0.1")
    peer = world.join(1)

    world.lose(0, running=running, blame=False)
    world.answer(peer)

    assert world.header()["attempts"] == 2
    assert world.sent[-1][1][0].flags == WorkFlag.NONE


def test_batch_that_was_running_at_a_death_runs_again_one_by_one_each_alone() -> None:
    world = RouterWorld()
    world.join(0)
    for i in range(3):
        world.ask(f"r{i}")
    running = world.tickets(b"w0.1")
    peer = world.join(1)

    world.lose(0, running=running)

    for i in range(3):
        assert world.ids(peer) == [f"r{i}"]
        assert world.sent[-1][1][0].flags & WorkFlag.ALONE
        world.answer(peer)
    assert [world.codes(f"r{i}") for i in range(3)] == [["ok"]] * 3


def test_all_that_a_dead_worker_had_is_suspect_when_its_batch_cannot_be_told() -> None:
    world = RouterWorld()
    world.core.workers.expect(0, 1)
    world.join(0)
    for i in range(3):
        world.ask(f"r{i}")

    world.lose(0, running=None)

    assert len(world.core.ledger.suspects) == 3


def test_second_death_is_poison_and_its_content_is_refused() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("evil", body=b"boom")
    first = world.tickets(b"w0.1")
    world.join(1)

    world.lose(0, running=first)
    world.lose(1, running=world.tickets(b"w1.1"))

    assert world.codes("evil") == ["poison"]
    assert world.header("evil")["attempts"] == 2
    assert world.core.stats(0.0)["poisoned"] == 1
    peer = world.join(0, 2)
    world.ask("again", body=b"boom")
    world.ask("else", body=b"calm")
    assert world.codes("again") == ["poison"]
    assert world.ids(peer) == ["else"]


def test_more_attempts_do_not_let_poison_kill_more_workers() -> None:
    world = RouterWorld(max_attempts=5)
    world.join(0)
    world.ask("evil", body=b"boom")
    first = world.tickets(b"w0.1")
    world.join(1)

    world.lose(0, running=first)
    world.lose(1, running=world.tickets(b"w1.1"))

    assert world.codes("evil") == ["poison"]


def test_neighbour_of_a_poisonous_request_is_answered() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("evil")
    world.ask("good", body=b"\x02")
    running = world.tickets(b"w0.1")
    world.join(1)
    peer = world.join(2)

    world.lose(0, running=running)
    slot = next(s for s in (1, 2) if world.held[f"w{s}.1".encode()])
    world.lose(slot, running=world.tickets(f"w{slot}.1".encode()))
    peer = f"w{3 - slot}.1".encode()
    world.answer(peer)

    assert world.codes("evil") == ["poison"]
    assert world.codes("good") == ["ok"]


def test_last_attempt_lost_without_blame_is_worker_lost() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("a")
    world.lose(0, running=world.tickets(b"w0.1"), blame=False)
    assert world.codes() == ["no_workers"]

    world = RouterWorld(max_attempts=1)
    world.join(0)
    world.join(1)
    world.ask("a")
    slot = next(s for s in (0, 1) if world.held[f"w{s}.1".encode()])
    world.lose(slot, running=world.tickets(f"w{slot}.1".encode()))
    assert world.codes() == ["worker_lost"]


def test_request_not_to_run_twice_is_not_sent_again() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("a", retry=False)
    world.join(1)

    world.lose(0, running=())

    assert world.codes() == ["worker_lost"]


def test_request_not_to_run_twice_survives_a_worker_that_gives_it_back() -> None:
    world = RouterWorld()
    peer = world.join(0)
    world.ask("a", retry=False)
    other = world.join(1)

    world.core.workers.bye(peer, world.tickets(peer), world.now)
    world.step()

    assert world.ids(other) == ["a"]


def test_request_past_its_deadline_at_a_death_is_told_so() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("a", timeout_ms=100)
    world.join(1)

    world.now += 0.2
    world.lose(0, running=())

    assert world.codes() == ["deadline_exceeded"]


def test_requests_that_come_back_never_push_the_backlog_over_its_bound() -> None:
    """The youngest give way: had they come a moment later they would have been refused."""
    world = RouterWorld(max_pending=5)
    world.core.workers.expect(0, 1)
    world.join(batch_limit=2)
    for i in range(9):
        world.ask(f"r{i}")

    world.lose(0, running=())

    assert world.core.ledger.pending == 5
    assert [world.codes(f"r{i}") for i in range(9)] == [[]] * 5 + [["overloaded"]] * 4


def test_suspect_prefers_another_slot_than_the_one_that_died() -> None:
    world = RouterWorld()
    world.core.workers.expect(0, 2)
    world.join(0)
    world.ask("a")
    world.lose(0, running=world.tickets(b"w0.1"))
    world.join(0, 2)
    world.held.clear()

    assert world.core.ledger.suspects.running is not None  # nobody else was there
    world = RouterWorld()
    world.join(0)
    world.ask("a")
    running = world.tickets(b"w0.1")
    world.join(1)
    world.join(2)
    world.core.workers.lost(0, 1, set(running), world.now, blame=True, reason="crash")
    world.core.workers.hello(b"w0.2", Hello(0, 2, 1, TOKEN, 32), world.now)
    world.step()
    assert world.core.ledger.suspects.reserved is not None
    assert world.core.ledger.suspects.reserved.slot != 0


def test_worker_reserved_for_a_suspect_gets_no_other_work_before_it() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("evil")
    running = world.tickets(b"w0.1")
    peer = world.join(1)
    world.core.workers.hold(0)
    for i in range(2):
        world.ask(f"before{i}")
    world.core.workers.release(0)
    other = world.join(2)
    world.core.workers.hold(2)  # so that the busy one is chosen

    world.lose(0, running=running)
    world.core.workers.release(2)
    world.ask("after")

    assert "after" not in world.ids(peer)
    assert world.ids(other) in (["after"], ["evil"])
    world.answer(peer)
    world.answer(other)
    world.answer(peer)
    assert world.codes("evil") == world.codes("after") == ["ok"]


def test_suspect_past_its_deadline_is_not_started() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("a", timeout_ms=1000)
    running = world.tickets(b"w0.1")
    peer = world.join(1)
    world.core.workers.hold(0)
    world.ask("busy")
    world.core.workers.release(0)
    world.lose(0, running=running)
    assert world.core.ledger.pending == 1

    world.now += 2.0
    world.answer(peer)

    assert world.codes() == ["deadline_exceeded"]
    assert world.core.ledger.suspects.running is None


def test_cancelled_suspect_lets_its_worker_go() -> None:
    world = RouterWorld()
    world.join(0)
    world.ask("a")
    running = world.tickets(b"w0.1")
    peer = world.join(1)
    world.lose(0, running=running)

    world.message([wire.pack_request({"type": "cancel", "id": "a"})])
    assert world.codes() == ["cancelled"]
    world.ask("b")
    assert world.ids(peer) == ["a"]  # it may still run: nothing beside it
    world.answer(peer)

    assert world.ids(peer) == ["b"]


def test_leaving_worker_gives_back_what_it_never_started_and_answers_the_rest() -> None:
    world = RouterWorld()
    peer = world.join(0)
    for i in range(4):
        world.ask(f"r{i}")
    running, queued = world.tickets(peer)[:2], world.tickets(peer)[2:]
    other = world.join(1)

    world.core.workers.bye(peer, queued, world.now)
    for ticket in queued:
        del world.held[peer][ticket]
    world.step()
    world.ask("new")
    world.answer(peer, running)
    world.lose(0, running=(), blame=False)
    world.answer(other)

    assert [world.header(i)["worker"] for i in ("r0", "r1", "r2", "r3", "new")] == [0, 0, 1, 1, 1]
    assert all(world.header(f"r{i}")["attempts"] == 1 for i in range(4))


def test_worker_that_cannot_be_reached_is_not_tried_again() -> None:
    world = RouterWorld()
    peer = world.join(0)
    other = world.join(1)
    world.unreachable.add(peer)

    for i in range(6):
        world.ask(f"r{i}")

    assert world.ids(other) == [f"r{i}" for i in range(6)]
    assert world.core.stats(0.0)["redispatched_total"] == {"send_failed": 1}


def test_results_of_strangers_and_of_nobody_are_counted_and_dropped() -> None:
    world = RouterWorld()
    peer = world.join()
    world.ask("a")
    (ticket,) = world.tickets(peer)

    world.core.workers.results(b"stranger", [Result(ticket, "ok")], world.now)
    world.core.workers.results(peer, [Result(ticket + 1, "ok")], world.now)
    world.step()

    assert world.codes() == []
    assert world.core.stats(0.0)["late_results_total"] == 2


def test_answer_that_cannot_be_passed_on_becomes_internal() -> None:
    world = RouterWorld()
    peer = world.join()
    world.ask("a")
    world.ask("b")
    bad: Any = "soon"

    world.answer(peer, world.tickets(peer)[:1], queue_s=bad)
    world.answer(peer, code="splendid")

    assert world.codes("a") == world.codes("b") == ["internal"]


def test_five_internal_errors_in_a_row_take_a_worker_out() -> None:
    world = RouterWorld()
    peer = world.join(0)
    world.core.workers.expect(1, 1)

    for i in range(5):
        world.ask(f"r{i}")
        world.answer(peer, code="internal", message="device")
    world.ask("next")

    assert [m for m in world.told if m["t"] == "sick"] == [
        {"t": "sick", "slot": 0, "incarnation": 1, "reason": "5 internal errors in a row"}
    ]
    assert not world.held[peer]
    other = world.join(1)
    assert world.ids(other) == ["next"]


def test_errors_that_requests_cause_take_no_worker_out() -> None:
    world = RouterWorld()
    peer = world.join(0)

    for i, code in enumerate(["model_error", "invalid_input", "out_of_memory", "too_large"] * 5):
        world.ask(f"r{i}")
        world.answer(peer, code=code)

    assert "sick" not in world.told_kinds()


def test_good_answer_ends_a_row_of_failures() -> None:
    world = RouterWorld()
    peer = world.join(0)

    for i in range(20):
        world.ask(f"r{i}")
        world.answer(peer, code="internal" if i % 5 else "ok")

    assert "sick" not in world.told_kinds()


def test_held_worker_gets_nothing_and_is_idle_when_done() -> None:
    world = RouterWorld()
    peer = world.join(0)
    other = world.join(1)
    world.ask("a")
    world.ask("b")

    world.core.workers.hold(0)
    world.ask("c")
    assert "c" in world.ids(other)
    assert "idle" not in world.told_kinds()
    world.answer(peer)

    assert world.told[-1] == {"t": "idle", "slot": 0}
    world.step()
    assert world.told_kinds().count("idle") == 1


def test_late_worker_gets_work_again_when_it_is_back_on_time() -> None:
    world = RouterWorld()
    late, prompt = world.join(0), world.join(1)

    world.core.workers.avoid(0, on=True)
    world.ask("a")
    world.ask("b")
    assert world.ids(prompt) == ["a", "b"]
    world.core.workers.avoid(0, on=False)
    world.ask("c")

    assert world.ids(late) == ["c"]


def test_hold_on_an_idle_or_absent_slot_is_idle_at_once() -> None:
    world = RouterWorld()
    world.join(0)

    world.core.workers.hold(0)
    world.core.workers.hold(5)
    world.step()

    assert sorted(m["slot"] for m in world.told if m["t"] == "idle") == [0, 5]


def test_when_all_are_held_accepted_work_is_finished_and_new_work_refused() -> None:
    world = RouterWorld()
    peer = world.join(0, batch_limit=1)
    for i in range(5):
        world.ask(f"r{i}")

    world.core.workers.hold(0)
    world.ask("new")
    assert world.codes("new") == ["draining"]
    while world.held[peer]:
        assert "idle" not in world.told_kinds()
        world.answer(peer)

    assert [world.codes(f"r{i}") for i in range(5)] == [["ok"]] * 5
    assert world.told_kinds().count("idle") == 1
    world.core.workers.release(0)
    world.ask("after")
    assert world.ids(peer) == ["after"]


def test_tickets_of_two_routers_of_a_pool_never_meet() -> None:
    tickets = []
    for epoch in (1, 2, (1 << 23) + 3):
        world = RouterWorld(epoch=epoch)
        world.core.workers.hello(b"w", Hello(0, 1, epoch, TOKEN, 32), world.now)
        for i in range(3):
            world.ask(f"r{i}")
        tickets.append(set(world.tickets(b"w")))

    assert not tickets[0] & tickets[1]
    assert not tickets[1] & tickets[2]
    assert all(0 < t < 1 << 63 for group in tickets for t in group)  # a board word holds them


def test_a_death_that_names_work_of_the_router_before_blames_nobody_of_this_one() -> None:
    before, world = RouterWorld(epoch=1), RouterWorld(epoch=2)
    before.join(0)
    before.ask("old")
    (old,) = before.tickets(b"w0.1")
    world.core.workers.hello(b"w", Hello(0, 1, 2, TOKEN, 32), world.now)
    world.ask("new")

    world.lose(0, running=[old])
    world.core.workers.hello(b"next", Hello(0, 2, 2, TOKEN, 32), world.now)
    world.step()
    assert world.ids(b"next") == ["new"]
    (request,) = world.core.ledger.all_open()
    assert (request.attempts, request.deaths) == (0, 0)
    assert "request_poisoned" not in world.events


def test_slower_card_gets_less() -> None:
    world = RouterWorld()
    fast, slow = world.join(0, batch_limit=8), world.join(1, batch_limit=8)
    world.core.workers.observe([Reading(0, 1, 0, 8, 0.01), Reading(1, 1, 0, 8, 0.03)], world.now)

    for i in range(8):
        world.ask(f"r{i}")

    assert (len(world.held[fast]), len(world.held[slow])) == (6, 2)


def test_content_that_is_never_run_again_is_poison_when_it_alone_has_killed_three() -> None:
    world = RouterWorld()
    for n in range(1, 5):
        peer = world.join(0, n)
        world.ask(f"r{n}", body=b"boom", retry=False)
        world.lose(0, n, running=world.tickets(peer))

    assert [world.codes(f"r{n}") for n in range(1, 5)] == [["worker_lost"]] * 2 + [["poison"]] * 2
    assert world.events.count("request_poisoned") == 1


def test_content_that_outlives_its_clients_patience_is_poison_too() -> None:
    world = RouterWorld()
    for n in range(1, 4):
        peer = world.join(0, n)
        world.ask(f"r{n}", body=b"hang", timeout_ms=1000)
        tickets = world.tickets(peer)
        world.advance(1.5)
        world.lose(0, n, running=tickets)
    world.join(0, 4)
    world.ask("r4", body=b"hang")

    assert world.codes("r3") == ["deadline_exceeded"]
    assert world.codes("r4") == ["poison"]


def test_frequent_content_is_not_blamed_for_workers_that_die_of_something_else() -> None:
    world = RouterWorld()
    for n in range(1, 8):
        peer = world.join(0, n)
        world.ask(f"well{n}", body=b"usual")
        world.answer(peer)
        world.now += 1.0
        world.ask(f"r{n}", body=b"usual", retry=False)
        world.lose(0, n, running=world.tickets(peer))

    assert all(world.codes(f"r{n}") == ["worker_lost"] for n in range(1, 8))
    assert world.core.stats(0.0)["poisoned"] == 0


def test_what_cannot_be_done_in_time_any_more_is_not_begun_while_others_wait() -> None:
    world = RouterWorld()
    peer = world.join(0, batch_limit=1)
    world.ask("known")
    world.answer(peer, batch_size=1, forward_s=0.1)
    for name, timeout_ms in (("runs", 60_000), ("next", 60_000), ("doomed", 1000), ("other", 60_000)):
        world.ask(name, timeout_ms=timeout_ms)
    world.advance(0.95)
    world.answer(peer, world.tickets(peer)[:1])

    assert world.codes("doomed") == ["deadline_exceeded"]
    assert world.ids(peer) == ["next", "other"]


def test_a_lone_request_is_tried_however_little_time_it_has() -> None:
    world = RouterWorld()
    peer = world.join(0, batch_limit=1)
    world.ask("known")
    world.answer(peer, batch_size=1, forward_s=0.1)
    world.ask("hurried", timeout_ms=20)

    assert world.ids(peer) == ["hurried"]
