"""Several clients at one router: fair turns, room for the lighter one, and nobody past a flood for nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool import wire
from gpupool.link import WorkFlag
from gpupool.router.backlog import Backlog
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant
from support.router_world import RouterWorld, many

NOW = 1000.0
FLOOD, CALM, THIRD = b"flood", b"calm", b"third"


def request(tenant: Tenant, sequence: int, *, rows: int = 1, priority: int = 5) -> Request:
    return Request(b"c", tenant, str(sequence), sequence, sequence / 1e3, 60.0, (), 10, rows=rows, priority=priority)


def turns(backlog: Backlog, names: dict[Tenant, str]) -> str:
    return "".join(names[backlog.pop(NOW).tenant] for _ in range(len(backlog)))


def test_tenants_take_turns_whatever_each_has_waiting() -> None:
    one, two, three = Tenant(), Tenant(), Tenant()
    backlog = Backlog()
    for i in range(6):
        backlog.push(request(one, i))
    for i in range(6, 9):
        backlog.push(request(two, i))
    backlog.push(request(three, 9))

    assert turns(backlog, {one: "a", two: "b", three: "c"}) == "abcababaaa"


def test_a_turn_costs_the_samples_that_it_gives() -> None:
    large, small = Tenant(), Tenant()
    backlog = Backlog()
    for i in range(2):
        backlog.push(request(large, i, rows=4))
    for i in range(2, 12):
        backlog.push(request(small, i))

    assert turns(backlog, {large: "L", small: "s"}) == "LssssLssssss"


def test_who_was_away_has_saved_nothing_up() -> None:
    steady, returning = Tenant(), Tenant()
    backlog = Backlog()
    for i in range(40):
        backlog.push(request(steady, i))
    backlog.push(request(returning, 40))
    for _ in range(30):
        backlog.pop(NOW)
    for i in range(41, 51):
        backlog.push(request(returning, i))

    assert turns(backlog, {steady: "s", returning: "r"})[:12] in {"rsrsrsrsrsrs", "srsrsrsrsrsr"}


def test_what_comes_back_from_a_worker_gets_its_turn_back() -> None:
    one, two = Tenant(), Tenant()
    backlog = Backlog()
    for i in range(4):
        backlog.push(request(one, i))
    for i in range(4, 8):
        backlog.push(request(two, i))
    taken = [backlog.pop(NOW) for _ in range(4)]

    backlog.restore(taken)

    order = [backlog.pop(NOW).sequence for _ in range(8)]
    assert [i for i in order if i < 4] == [0, 1, 2, 3]
    assert [i for i in order if i >= 4] == [4, 5, 6, 7]
    assert all((a < 4) != (b < 4) for a, b in itertools.pairwise(order))


@given(st.data())
def test_shares_of_busy_tenants_differ_by_two_turns_at_most(data: st.DataObject) -> None:
    """The bound of start-time fair queueing: one largest request of each of the two."""
    tenants = [Tenant() for _ in range(data.draw(st.integers(2, 5)))]
    backlog, sequence = Backlog(), 0
    served = dict.fromkeys(tenants, 0)
    for _ in range(data.draw(st.integers(10, 60))):
        for tenant in tenants:
            for _ in range(data.draw(st.integers(1 if tenant.pending < 2 else 0, 3))):
                sequence += 1
                backlog.push(request(tenant, sequence, rows=data.draw(st.integers(1, 3))))
        taken = backlog.pop(NOW)
        served[taken.tenant] += taken.rows

    assert max(served.values()) - min(served.values()) <= 6


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from(["push", "pop", "remove", "restore"]))))
def test_counts_agree_whatever_comes_and_goes(steps: list[tuple[int, int, str]]) -> None:
    tenants = [Tenant() for _ in range(4)]
    backlog = Backlog()
    taken: list[Request] = []
    for sequence, (who, priority, what) in enumerate(steps):
        if what == "push":
            backlog.push(request(tenants[who], sequence, rows=1 + who, priority=priority))
        elif what == "pop" and len(backlog):
            head = backlog.head()
            taken.append(backlog.pop(NOW))
            assert taken[-1] is head
        elif what == "remove" and len(backlog):
            backlog.remove(backlog.last_of(next(iter(backlog.tenants))))
        elif what == "restore":
            backlog.restore(taken)
            taken = []
        waiting = list(backlog)
        assert len(backlog) == len(waiting) == sum(t.pending for t in tenants)
        assert set(backlog.tenants) == {r.tenant for r in waiting}
        assert backlog.rows == sum(r.rows for r in waiting)
        assert backlog.size_bytes == sum(r.size for r in waiting) == sum(t.size_bytes for t in tenants)
    left = list(backlog)
    assert sorted(backlog.pop(NOW).sequence for _ in left) == sorted(r.sequence for r in left)


def simulated(flood_priority: int, calm_priority: int, seconds: float = 30.0) -> list[float]:
    """A worker does 20 a second, one client keeps 800 waiting, another asks once a second; how long the latter waited, each time."""
    backlog, flood, calm = Backlog(), Tenant(), Tenant()
    sequence, waits, asked = 0, [], 0.0
    now = 0.0
    while now < seconds:
        now += 0.05
        while flood.pending < 800:
            sequence += 1
            backlog.push(Request(b"f", flood, "f", sequence, now, now + 60, (), 1, priority=flood_priority))
        if now >= asked:
            asked += 1.0
            sequence += 1
            backlog.push(Request(b"c", calm, "c", sequence, now, now + 60, (), 1, priority=calm_priority))
        taken = backlog.pop(now)
        if taken.tenant is calm:
            waits.append(now - taken.arrived)
    return waits


@pytest.mark.parametrize(("flood_priority", "calm_priority"), [(5, 5), (5, 9), (4, 5), (0, 9)])
def test_a_standing_flood_of_the_same_or_a_lower_priority_delays_nobody(flood_priority: int, calm_priority: int) -> None:
    waits = simulated(flood_priority, calm_priority)

    assert len(waits) >= 29
    assert max(waits) < 0.11


def test_a_flood_of_a_higher_priority_delays_by_the_seconds_of_ageing_and_no_more() -> None:
    waits = simulated(9, 5)

    assert len(waits) >= 6
    assert waits[0] == pytest.approx(4.0, abs=0.11)


def test_one_large_request_at_a_time_pays_for_its_rows() -> None:
    backlog, large, small = Backlog(), Tenant(), Tenant()
    rows, sequence = {large: 0, small: 0}, itertools.count()
    for _ in range(2000):
        if not large.pending:
            backlog.push(request(large, next(sequence), rows=100))
        while small.pending < 3:
            backlog.push(request(small, next(sequence)))
        taken = backlog.pop(NOW)
        rows[taken.tenant] += taken.rows

    assert rows[large] <= rows[small] + 200


def test_work_that_came_back_gives_no_newcomer_an_advantage() -> None:
    backlog, one, two, newcomer = Backlog(), Tenant(), Tenant(), Tenant()
    for i in range(200):
        backlog.push(request(one, i))
    taken = [backlog.pop(NOW) for _ in range(100)]
    for i in range(300, 350):
        backlog.push(request(two, i))
    backlog.restore(taken)
    for i in range(400, 450):
        backlog.push(request(newcomer, i))

    assert "t" in turns(backlog, {one: "o", two: "t", newcomer: "n"})[:4]


# In the router


def flooded(waiting: int = 200, **options: object) -> tuple[RouterWorld, bytes]:
    """A worker with a limit of 8 that runs a batch and has another one, and a flood behind it."""
    world = RouterWorld(**options)
    peer = world.join(0, batch_limit=8)
    for i in range(16 + waiting):
        world.ask(f"f{i}", client=FLOOD, step=False)
    world.step()
    assert len(world.ids(peer)) == 16
    return world, peer


def test_a_calm_client_passes_the_flood_into_the_next_batch() -> None:
    world, peer = flooded()

    world.ask("c", client=CALM)

    assert world.ids(peer)[-1] == "c"
    sent = world.held[peer][world.tickets(peer)[-1]]
    assert sent.flags & WorkFlag.URGENT


def test_nobody_is_let_past_to_a_worker_that_has_proved_nothing() -> None:
    world = RouterWorld()
    peer = world.join(0, batch_limit=32, proven=False)
    for i in range(100):
        world.ask(f"f{i}", client=FLOOD, step=False)
    world.step()
    for i in range(5):
        world.ask("c", client=b"c%d" % i)

    assert len(world.ids(peer)) == 8


def test_what_was_let_past_and_came_back_is_urgent_no_more() -> None:
    world, peer = flooded(waiting=0)
    world.ask("f", client=FLOOD)
    world.ask("c", client=CALM)
    assert world.ids(peer)[-1] == "c"
    other = world.join(1, batch_limit=8)
    world.lose(0)

    flags = {r.id: r.flags for r in world.held[other].values()}
    assert not any(f & WorkFlag.URGENT for f in flags.values())


def test_it_passes_with_one_request_only_and_then_takes_turns() -> None:
    world, peer = flooded()
    for i in range(4):
        world.ask(f"c{i}", client=CALM)

    assert [i for i in world.ids(peer) if i.startswith("c")] == ["c0"]
    world.answer(peer, world.tickets(peer)[:8])  # the flood's first batch

    assert world.ids(peer)[9:] == ["f16", "c1", "f17", "c2", "f18", "c3", "f19"]


def test_many_calm_clients_do_not_pile_up_at_a_worker() -> None:
    world = RouterWorld()
    peer = world.join(0, batch_limit=8)
    for i in range(100):
        world.ask("x", client=b"c%d" % i, step=False)
    world.step()

    assert len(world.ids(peer)) == 16


def test_what_is_let_past_is_bounded() -> None:
    world, peer = flooded()
    for i in range(30):
        world.ask("x", client=b"c%d" % i)

    assert len(world.ids(peer)) <= 16 + 4


def test_a_full_queue_makes_room_for_the_lighter_client() -> None:
    world, _ = flooded(waiting=10, max_pending=10)

    world.ask("c0", client=CALM)
    for i in range(9):
        world.ask(f"c{i + 1}", client=CALM)

    # The first goes to the worker at once; then it takes places as long as the other has more than twice as many.
    assert [c for i in range(10) for c in world.codes(f"c{i}", CALM)] == ["overloaded"] * 6
    refused = [i for i in range(26) if world.codes(f"f{i}", FLOOD)]
    assert refused == [23, 24, 25]
    assert world.header("f25", FLOOD)["retry_after_ms"] > 0
    assert world.core.stats(0.0)["displaced_total"] == 3


def test_bytes_make_room_too() -> None:
    world, _ = flooded(waiting=0, max_pending_bytes=1000)
    for i in range(9):
        world.ask(f"b{i}", client=FLOOD, body=bytes(100))

    world.ask("t", client=THIRD, body=bytes(300))
    world.ask("c", client=CALM, body=bytes(300))

    assert world.codes("c", CALM) == []
    assert [i for i in range(9) if world.codes(f"b{i}", FLOOD)] == [7, 8]


def test_equal_clients_displace_nobody() -> None:
    world = RouterWorld(max_pending=10)
    world.join(0, batch_limit=1)
    for i in range(30):
        world.ask("x", client=b"c%d" % i)

    codes = [world.codes("x", b"c%d" % i) for i in range(30)]
    assert codes.count([]) == 12
    assert world.core.stats(0.0)["displaced_total"] == 0


def test_a_share_of_the_queue_bounds_each_client() -> None:
    world, _ = flooded(waiting=3, max_pending=10, max_client_share=0.5)
    for i in range(10):
        world.ask(f"g{i}", client=FLOOD)

    refused = [i for i in range(10) if world.codes(f"g{i}", FLOOD)]
    assert refused == [2, 3, 4, 5, 6, 7, 8, 9]
    assert "this client" in world.header("g9", FLOOD)["message"]


def test_clients_without_a_deadline_are_refused_while_their_queue_stands() -> None:
    world, peer = flooded(waiting=20, target_delay_ms=1000)
    world.ask("burst", client=FLOOD)
    world.advance(1.5)

    world.ask("late", client=FLOOD)
    world.ask("bounded", client=FLOOD, timeout_ms=20_000)
    world.ask("other", client=CALM)

    assert world.codes("burst", FLOOD) == world.codes("bounded", FLOOD) == world.codes("other", CALM) == []
    assert world.codes("late", FLOOD) == ["overloaded"]
    for _ in range(6):
        world.answer(peer)
    world.ask("after", client=FLOOD)
    assert world.codes("after", FLOOD) == []


def test_waiting_for_workers_is_no_standing_queue() -> None:
    world = RouterWorld(target_delay_ms=1000)
    world.core.workers.expect(0, 1)
    world.join(0)
    world.lose(0)
    world.core.workers.expect(0, 1)
    world.ask("a")
    world.advance(2.0)
    world.ask("b")

    assert world.codes("b") == []


def test_a_light_client_is_not_refused_for_the_backlog_of_a_heavy_one() -> None:
    world, peer = flooded(waiting=400)
    for _ in range(3):
        world.answer(peer, world.tickets(peer)[:8], batch_size=8, forward_s=1.0)
    world.core.workers.forecast.update(world.core.workers.fleet.usable)

    world.ask("c", client=CALM, timeout_ms=10_000)
    world.ask("f", client=FLOOD, timeout_ms=10_000)

    assert world.codes("c", CALM) == []
    assert world.codes("f", FLOOD) == ["overloaded"]


# Garbage


def test_a_run_of_garbage_is_silenced_and_counted_and_sense_is_still_served() -> None:
    world = RouterWorld()
    world.join()
    for _ in range(300):
        world.message([b"\xc1", b"x"], client=FLOOD)

    assert len(world.replies[FLOOD, None]) == 256
    assert world.core.stats(0.0)["silenced_total"] == 44
    assert world.events.count("client_silenced") == 1
    world.ask("a", client=FLOOD)
    world.message([b"\xc1", b"x"], client=FLOOD)
    world.message([b"\xc1", b"x"], client=CALM)

    assert len(world.replies[FLOOD, None]) == 257
    assert len(world.replies[CALM, None]) == 1
    assert world.core.stats(0.0)["accepted_total"] == 256 + 3


@pytest.mark.parametrize("code", ["unknown_model", "too_large"])
def test_what_is_merely_refused_is_no_garbage(code: str) -> None:
    world = RouterWorld(max_message_bytes=1024)
    world.join()
    for i in range(300):
        if code == "too_large":
            world.ask(i.to_bytes(2, "big"), client=CALM, body=bytes(2000))
        else:
            world.ask(i.to_bytes(2, "big"), client=CALM, model="nobody")

    assert world.core.stats(0.0)["replied_total"] == {code: 300}


# Retries


def test_a_storm_of_deaths_uses_up_the_retry_budget() -> None:
    world = RouterWorld(slots=1, max_attempts=10)
    world.core.workers.expect(0, 1)
    for n in range(
        1, 8
    ):  # each kills a worker with 32 new requests on it; what would run again is cancelled, so that it does not
        peer = world.join(0, n)
        for i in range(32):
            world.ask(f"r{n}.{i}", step=False)
        world.step()
        world.lose(0, n, running=world.tickets(peer))
        for request in list(world.core.ledger.suspects):
            world.message([wire.pack_request({"type": "cancel", "id": request.id})])

    books = world.core.stats(0.0)
    assert books["replied_total"] == {"cancelled": 100, "worker_lost": 7 * 32 - 100}
    assert books["unretried_total"] == 7 * 32 - 100


def test_many_rows_count_as_many_for_turns() -> None:
    world = RouterWorld()
    peer = world.join(0, batch_limit=4)
    for i in range(8):
        world.ask(f"s{i}", client=CALM, step=False)
    world.step()
    world.ask("m0", client=FLOOD, body=many(8), many=True, step=False)
    world.ask("m1", client=FLOOD, body=many(8), many=True, step=False)
    for i in range(8, 16):
        world.ask(f"s{i}", client=CALM, step=False)
    world.step()
    world.answer(peer, world.tickets(peer)[:8])

    assert [i for i in world.ids(peer) if i.startswith("m")][:1] == ["m0"]
