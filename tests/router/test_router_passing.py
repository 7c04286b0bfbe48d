"""Past one large request at a worker: who is let past, how much at a time, and that the large one goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.link import WorkFlag
from support.router_world import RouterWorld, many

FLOOD, CALM, THIRD = b"flood", b"calm", b"third"


def held(world: RouterWorld, peer: bytes, client: bytes) -> list[str]:
    return [str(r.id) for r in world.held[peer].values() if r.client == client]


def shut(rows: int = 1000, *, workers: int = 1, batch_limit: int = 8, proven: bool = True, **options: object) -> RouterWorld:
    """Workers of which each has one large request, and nothing else."""
    world = RouterWorld(**options)
    for slot in range(workers):
        world.join(slot, batch_limit=batch_limit, proven=proven)
        world.ask(f"m{slot}", client=b"large%d" % slot, body=many(rows), many=True)
        assert world.ids(b"w%d.1" % slot) == [f"m{slot}"]
    return world


PEER = b"w0.1"


@pytest.mark.parametrize("rows", [16, 20, 21, 1000, 60_000])
@pytest.mark.parametrize("batch_limit", [1, 2, 8])
def test_a_calm_client_passes_one_large_request(rows: int, batch_limit: int) -> None:
    world = shut(rows, batch_limit=batch_limit)

    world.ask("c", client=CALM)

    assert held(world, PEER, CALM) == ["c"]
    assert world.held[PEER][world.tickets(PEER)[-1]].flags & WorkFlag.URGENT


def test_a_large_request_at_a_worker_that_has_proved_nothing_is_passed_too() -> None:
    world = shut(batch_limit=32, proven=False)
    for i in range(30):
        world.ask("c", client=b"c%d" % i)

    assert len(world.ids(PEER)) == 1 + 8


def test_what_passes_a_large_request_is_bounded_in_rows() -> None:
    world = shut()
    for i in range(30):
        world.ask("x", client=b"c%d" % i)

    assert len(world.ids(PEER)) == 1 + 4


def test_what_passes_a_request_of_many_bytes_is_bounded_in_bytes() -> None:
    world = RouterWorld(slots=1, max_pending_bytes=4000, max_message_bytes=4000)
    world.join(0, batch_limit=64)
    world.ask("m", client=FLOOD, body=many(1000) + bytes(1200), many=True)
    for i in range(12):
        world.ask("x", client=b"c%d" % i, body=bytes(300))

    assert len(world.ids(PEER)) == 1 + 3


def test_a_second_large_request_passes_nothing_and_keeps_no_small_one_back() -> None:
    world = shut()
    world.ask("second", client=THIRD, body=many(100), many=True)
    world.ask("c", client=CALM)

    assert world.ids(PEER) == ["m0", "c"]
    world.answer(PEER)

    assert world.ids(PEER) == ["second"]


def test_a_request_that_fits_one_batch_passes_when_nothing_else_does() -> None:
    world = shut()
    world.ask("batch", client=CALM, body=many(8), many=True)
    world.ask("x", client=THIRD)

    assert world.ids(PEER) == ["m0", "batch"]
    world.answer(PEER, world.tickets(PEER)[1:])
    world.answer(PEER, world.tickets(PEER)[1:])
    assert world.codes("x", THIRD) == ["ok"]


def test_the_large_request_runs_between_those_that_pass_it() -> None:
    """Those that passed together are all answered before the next ones pass: the batch that starts in between is not theirs."""
    world = shut()
    world.ask("a", client=CALM)
    world.ask("b", client=THIRD)
    first, second = world.tickets(PEER)[1:]
    world.answer(PEER, [first])

    world.ask("a2", client=CALM)
    assert world.ids(PEER) == ["m0", "b"]
    world.answer(PEER, [second])

    assert world.ids(PEER) == ["m0", "a2"]


def test_the_client_of_the_large_request_passes_it_with_a_higher_priority_only() -> None:
    world = shut()
    world.ask("same", client=b"large0")
    world.ask("lower", client=b"large0", priority=4)
    assert world.ids(PEER) == ["m0"]

    world.ask("higher", client=b"large0", priority=6)

    assert world.ids(PEER) == ["m0", "higher"]


def test_a_free_worker_comes_before_one_that_a_large_request_has() -> None:
    world = shut()
    free = world.join(1, batch_limit=8)
    for i in range(10):
        world.ask("x", client=b"c%d" % i)

    assert (world.ids(PEER), len(world.ids(free))) == (["m0"], 10)


def test_many_calm_clients_pass_one_large_request() -> None:
    world = shut()
    for i in range(100):
        world.ask("x", client=b"c%d" % i, step=False)
    world.step()

    assert len(world.ids(PEER)) == 1 + 4


def test_who_passes_a_large_request_is_not_refused_for_its_sake() -> None:
    world = shut(rows=1)
    world.answer(PEER, batch_size=8, forward_s=0.08)
    world.core.workers.forecast.update(world.core.workers.fleet.usable)
    world.ask("m", client=FLOOD, body=many(1000), many=True)
    world.ask("n", client=FLOOD, body=many(1000), many=True)

    world.ask("c", client=CALM, timeout_ms=1500)
    world.ask("f", client=FLOOD, timeout_ms=1500)

    assert held(world, PEER, CALM) == ["c"]
    assert world.codes("f", FLOOD) == ["overloaded"]


@given(
    large=st.lists(st.integers(16, 2000), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans(), st.integers(0, 2)), max_size=60),
)
def test_nothing_is_kept_back_while_it_could_pass(large: list[int], steps: list[tuple[int, int, bool, int]]) -> None:
    """At every moment: what passed at a worker is bounded, and no lone sample waits while some worker could still be passed at."""
    world = RouterWorld()
    for slot, rows in enumerate(large):
        world.join(slot, batch_limit=8)
        world.ask(f"m{slot}", client=b"large%d" % slot, body=many(rows), many=True)
    for number, (who, rows, answer, slot) in enumerate(steps):
        peer = b"w%d.1" % (slot % len(large))
        past = [t for t, r in world.held[peer].items() if r.flags & WorkFlag.URGENT]
        if answer:
            world.answer(peer, past[:1])
        elif rows > 4:
            world.ask(number, client=b"c%d" % who)
        else:
            world.ask(number, client=b"c%d" % who, body=many(rows), many=True)
        open_at = []
        for worker in world.core.workers.fleet.usable:
            passed = [r.rows for r in worker.outstanding.values() if r.flags & WorkFlag.URGENT]
            assert sum(passed) <= 4 or len(passed) == 1
            if not passed:
                open_at.append(worker.slot)
        waiting = [r for r in world.core.ledger.backlog if not r.tenant.outstanding]
        assert not (open_at and waiting)
