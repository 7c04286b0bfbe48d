"""The registry of workers."""

from __future__ import annotations

from gpupool.link import Hello
from gpupool.router.requests import Request
from gpupool.router.tenants import Tenant
from gpupool.router.workers import Fleet, Worker

TENANT = Tenant()


def worker(slot: int = 0, incarnation: int = 1, limit: int = 8) -> Worker:
    return Worker(f"{slot}.{incarnation}".encode(), Hello(slot, incarnation, 1, "", limit))


def request(ticket: int, rows: int = 1, size: int = 0) -> Request:
    made = Request(b"c", TENANT, ticket.to_bytes(2, "big"), ticket, 0.0, 1.0, (), size, rows=rows)
    made.ticket = ticket
    return made


def test_rows_are_counted_until_their_tickets_return() -> None:
    w = worker()
    w.give(request(1, rows=3))
    w.give(request(2, rows=0))  # an empty list costs a place too

    assert w.rows == 4
    assert w.take_back(1) is not None
    assert w.take_back(1) is None
    assert w.rows == 1


def test_idle_worker_has_room_for_anything() -> None:
    fleet, w = Fleet(0, 1 << 20), worker(limit=1)
    fleet.add(w)

    assert w.has_room
    w.give(request(1, rows=50))
    assert not w.has_room


def test_what_several_threads_preprocess_is_room_on_top() -> None:
    def room(max_queue: int, threads: int) -> int:
        fleet, w = Fleet(max_queue, 1 << 20), Worker(b"w", Hello(0, 1, 1, "", 8, threads))
        fleet.add(w)
        w.proven = True
        fleet.set_limit(w, 8)
        return w.room

    assert [room(100, threads) for threads in (0, 1, 4)] == [16, 16, 19]
    assert room(2, 4) == 8 + 2  # no more may wait in a worker


def test_room_is_counted_in_bytes_too_and_an_idle_worker_takes_one_of_any_size() -> None:
    fleet, w = Fleet(100, room_bytes=100), worker(limit=32)
    fleet.add(w)
    w.proven = True
    fleet.set_limit(w, 32)

    w.give(request(1, size=60))
    assert w.has_room
    w.give(request(2, size=60))
    assert not w.has_room
    assert not w.lets_past(request(9, size=60))
    assert w.lets_past(request(9, size=25))
    w.take_back(1)
    assert w.has_room
    w.take_back(2)
    w.give(request(3, size=1000))
    assert not w.has_room
    w.take_back(3)
    assert w.has_room
    assert w.size_bytes == 0


def test_dead_incarnation_stays_dead() -> None:
    fleet = Fleet(100, 1 << 20)
    fleet.add(worker(0, 3))

    assert fleet.lose(0, 2) is None  # an older one's death
    assert fleet.by_slot
    lost = fleet.lose(0, 3)

    assert lost is not None
    assert not fleet.by_slot
    assert not fleet.by_peer
    assert fleet.is_lost(0, 3)
    assert fleet.is_lost(0, 1)
    assert not fleet.is_lost(0, 4)


def test_held_and_sick_and_leaving_workers_are_not_usable() -> None:
    fleet = Fleet(100, 1 << 20)
    workers = [worker(slot) for slot in range(4)]
    for w in workers:
        fleet.add(w)

    fleet.held.add(0)
    workers[1].sick = True
    workers[2].leaving = True
    fleet.changed()

    assert fleet.usable == [workers[3]]


def test_held_workers_are_usable_when_all_are_held() -> None:
    fleet = Fleet(100, 1 << 20)
    for slot in range(2):
        fleet.add(worker(slot))

    fleet.held |= {0, 1}
    fleet.changed()

    assert fleet.all_held
    assert len(fleet.usable) == 2


def test_late_worker_gets_nothing_also_when_there_is_no_other() -> None:
    fleet = Fleet(100, 1 << 20)
    late, prompt = worker(0), worker(1)
    fleet.add(late)
    fleet.add(prompt)

    fleet.avoided.add(0)
    fleet.changed()
    assert fleet.usable == [prompt]
    fleet.held.add(1)
    fleet.changed()

    assert fleet.usable == []
    fleet.lose(0, 1)
    fleet.add(worker(0, 2))
    assert not fleet.avoided  # a new process is not late


def test_nobody_is_not_all_held() -> None:
    fleet = Fleet(100, 1 << 20)
    fleet.held.add(0)

    assert not fleet.all_held


def test_worker_on_a_new_connection_is_found_there_only() -> None:
    fleet, w = Fleet(100, 1 << 20), worker()
    fleet.add(w)

    fleet.move(w, b"new")

    assert fleet.by_peer == {b"new": w}
