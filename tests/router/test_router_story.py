"""What the router tells of requests that a worker's death has touched, so that their story can be told."""

from __future__ import annotations

from gpupool.router.ledger import _NAMED
from support.router_world import RouterWorld


def test_each_request_of_a_dead_worker_is_named_with_where_it_was_and_for_how_long() -> None:
    world = RouterWorld()
    peer = world.join(0)
    world.ask("a")
    other = world.join(1, 3)
    world.now += 0.5
    (ticket,) = world.held[peer]
    world.lose(0, running=[ticket])
    world.now += 0.25
    world.answer(other, started=True)

    (event,) = [e for e in world.log if e.name == "request_redispatched"]
    assert not event.told
    assert event.fields == {
        "request_id": "a", "client": "636c69656e742d31", "ticket": ticket, "worker": 0, "incarnation": 1, "reason": "crash",
        "attempts": 1, "worker_deaths": 1, "alone": True, "pending_ms": 0.0, "held_ms": 500.0,
    }  # fmt: skip
    (record,) = world.records
    assert (record["worker"], record["incarnation"], record["attempts"]) == (1, 3, 2)
    assert "user" not in record


def test_what_was_lost_at_a_dead_worker_is_in_the_total_alone() -> None:
    """A request is 1 s at a worker that dies, waits 0.25 s, and is 2 s at another one that answers."""
    world = RouterWorld()
    peer = world.join(0)
    world.core.workers.expect(1, 1)
    world.ask("a")
    (ticket,) = world.held[peer]
    world.now += 1.0
    world.lose(0, running=[ticket])
    world.now += 0.25
    other = world.join(1)
    world.now += 2.0
    world.answer(other, started=True)

    (event,) = [e for e in world.log if e.name == "request_redispatched"]
    assert (event.fields["pending_ms"], event.fields["held_ms"]) == (0.0, 1000.0)
    (record,) = world.records
    assert (record["pending_ms"], record["total_ms"]) == (250.0, 3250.0)


def test_one_that_waits_again_until_its_end_has_waited_all_that_time() -> None:
    world = RouterWorld()
    peer = world.join(0)
    world.core.workers.expect(1, 1)
    world.ask("a", timeout_ms=5000)
    (ticket,) = world.held[peer]
    world.now += 1.0
    world.lose(0, running=[ticket])
    world.advance(5.0)

    (record,) = world.records
    assert record["code"] == "deadline_exceeded"
    assert record["total_ms"] - record["pending_ms"] == 1000.0


def test_the_death_is_told_to_the_pool_with_whose_requests_it_touched() -> None:
    world = RouterWorld()
    world.core.named(b"client-2", "alice")
    world.join(0)
    for n in range(3):
        world.ask(f"a{n}", client=b"client-2")
    world.ask("b")
    world.lose(0)

    (event,) = [e for e in world.log if e.name == "worker_lost"]
    assert event.told
    assert event.fields["clients"] == {"alice": 3, "636c69656e742d31": 1}
    assert {e.fields.get("user") for e in world.log if e.name == "request_redispatched"} == {"alice", None}


def test_of_very_many_some_are_named_and_the_rest_counted() -> None:
    world = RouterWorld()
    peer = world.join(0, batch_limit=1000)
    for n in range(_NAMED + 40):
        world.ask(str(n), step=False)
    world.step()
    held = len(world.held[peer])
    world.lose(0)

    named = [e for e in world.log if e.name == "request_redispatched"]
    (more,) = [e for e in world.log if e.name == "more_requests_redispatched"]
    assert len(named) == _NAMED
    assert more.fields["unnamed"] == held - _NAMED


def test_poison_is_told_with_the_request_and_the_worker_that_died_of_it_last() -> None:
    world = RouterWorld()
    peers = [world.join(0)]
    world.ask("a")
    peers += [world.join(slot) for slot in (1, 2)]
    for slot in (0, 1):
        (ticket,) = world.held[peers[slot]]
        world.lose(slot, running=[ticket])

    (event,) = [e for e in world.log if e.name == "request_poisoned"]
    assert event.told
    assert (event.fields["request_id"], event.fields["worker"], event.fields["worker_deaths"]) == ("a", 1, 2)
    assert world.records[-1]["code"] == "poison"


def test_the_name_of_a_key_stands_in_each_record_of_its_requests_refused_ones_too() -> None:
    world = RouterWorld()
    world.core.named(b"client-2", "alice")
    peer = world.join(0)
    world.ask("a", client=b"client-2")
    world.ask("a", client=b"client-2")
    world.answer(peer)

    assert [(r["code"], r["user"]) for r in world.records] == [("bad_request", "alice"), ("ok", "alice")]
