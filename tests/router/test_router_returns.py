"""Requests that come back unbegun from workers that ended for no known reason: how often, and what follows."""

from __future__ import annotations

import pytest

from gpupool.link import WorkFlag
from gpupool.router.ledger import MAX_RETURNS, POISON_DEATHS
from gpupool.router.requests import SUSPECT_RETURNS
from support.router_world import RouterWorld


def hopeful_world() -> RouterWorld:
    """A router whose one worker has been there and will come back."""
    world = RouterWorld()
    world.core.workers.joined_ever = True
    world.core.workers.expect(0, 1)
    return world


def leave(world: RouterWorld, peer: bytes) -> None:
    """The worker gives back all that it has, and exits in good order, unasked."""
    tickets = world.tickets(peer)
    world.core.workers.bye(peer, tickets, world.now)
    world.held[peer].clear()


def end(world: RouterWorld, incarnation: int, how: str) -> None:
    if how == "leave":
        leave(world, b"w0.%d" % incarnation)
    world.lose(0, incarnation, running=())


@pytest.mark.parametrize("how", ["leave", "die"])
def test_what_ends_workers_without_being_marked_is_poison_after_a_bounded_number(how: str) -> None:
    world = hopeful_world()
    world.ask(timeout_ms=60_000)

    for incarnation in range(1, 20):
        peer = world.join(0, incarnation)
        if not world.ids(peer):
            break
        end(world, incarnation, how)

    assert world.codes() == ["poison"]
    assert incarnation - 1 == SUSPECT_RETURNS + POISON_DEATHS
    world.ask("again", timeout_ms=60_000)
    assert world.codes("again") == ["poison"]


def test_three_returns_make_a_request_run_alone_and_its_companions_are_answered() -> None:
    world = hopeful_world()
    world.ask("killer", timeout_ms=60_000)
    world.ask("bystander", body=b"\x02", timeout_ms=60_000)
    for incarnation in range(1, SUSPECT_RETURNS + 1):
        peer = world.join(0, incarnation)
        assert world.ids(peer) == ["killer", "bystander"]
        end(world, incarnation, "leave")

    while not world.replies[b"client-1", "killer"]:
        incarnation += 1
        peer = world.join(0, incarnation)
        while world.ids(peer) == ["bystander"]:
            assert world.held[peer][world.tickets(peer)[0]].flags & WorkFlag.ALONE
            world.answer(peer)
        assert len(world.ids(peer)) <= 1
        if world.ids(peer):
            end(world, incarnation, "leave")

    world.join(0, incarnation + 1)
    world.answer(b"w0.%d" % (incarnation + 1))
    assert world.codes("killer") == ["poison"]
    assert world.codes("bystander") == ["ok"]


def test_planned_ends_never_count() -> None:
    world = hopeful_world()
    world.ask(timeout_ms=60_000)
    for incarnation in range(1, 3 * MAX_RETURNS):
        peer = world.join(0, incarnation)
        assert world.ids(peer) == ["a"]
        if incarnation % 2:
            world.core.workers.hold(0)
        else:
            world.core.workers.avoid(0, on=True)
        leave(world, peer)
        world.lose(0, incarnation, running=(), blame=False)
        world.core.workers.release(0)
        world.core.workers.avoid(0, on=False)

    world.answer(world.join(0, 3 * MAX_RETURNS))
    assert world.codes() == ["ok"]


def test_deaths_that_another_request_is_marked_for_never_count() -> None:
    world = hopeful_world()
    world.ask("waits", body=b"\x02", timeout_ms=60_000)
    for incarnation in range(1, 3 * MAX_RETURNS):
        peer = world.join(0, incarnation, batch_limit=8)
        world.ask(f"runs{incarnation}", body=b"%c" % (incarnation + 2), retry=False)
        running = [t for t, r in world.held[peer].items() if r.id != "waits"]
        assert running
        world.lose(0, incarnation, running=running)

    world.answer(world.join(0, 3 * MAX_RETURNS))
    assert world.codes("waits") == ["ok"]


def test_one_that_only_seemed_to_be_asked_to_leave_counts_when_it_is_gone() -> None:
    """A worker whose beat is missing is avoided, as one that is being ended is."""
    world = hopeful_world()
    world.ask(timeout_ms=60_000)
    for incarnation in range(1, 4 * MAX_RETURNS):
        peer = world.join(0, incarnation)
        if not world.ids(peer):
            break
        world.core.workers.avoid(0, on=True)
        end(world, incarnation, "leave")

    assert world.codes() == ["worker_lost"]
    assert "ended before they began" in world.header()["message"]
    assert incarnation - 1 <= MAX_RETURNS + 1
