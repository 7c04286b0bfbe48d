"""Clients that are known by a key: one tenant for all their connections, with the bounds of the configuration."""

from __future__ import annotations

import gc

from gpupool.spec import ClientSpec
from support.router_world import RouterWorld

ONE, TWO, OTHER = b"one", b"two", b"other"


def busy(**options: object) -> RouterWorld:
    """A router whose one worker has all it takes."""
    world = RouterWorld(**options)
    world.join(0, batch_limit=1)
    for i in range(2):
        world.ask(f"w{i}", client=OTHER)
    return world


def test_connections_of_one_key_share_its_bounds() -> None:
    world = busy(clients={"alice": ClientSpec(max_pending=3)})
    for client in (ONE, TWO):
        world.core.named(client, "alice")
    for i in range(2):
        world.ask(f"a{i}", client=ONE)
        world.ask(f"b{i}", client=TWO)
        world.ask(f"o{i}", client=OTHER)

    assert world.codes("b1", TWO) == ["overloaded"]
    assert "its limit is 3" in world.header("b1", TWO)["message"]
    assert all(world.codes(f"o{i}", OTHER) == [] for i in range(2))


def test_a_key_may_not_have_a_higher_priority_than_its_bound() -> None:
    world = busy(clients={"alice": ClientSpec(max_priority=2)})
    world.core.named(ONE, "alice")
    world.ask("a", client=ONE, priority=9)
    world.ask("b", client=ONE, priority=1)

    assert sorted(r.priority for r in world.core.ledger.backlog) == [1, 2]


def test_bytes_of_a_key_are_bounded_and_new_bounds_hold_at_once() -> None:
    world = busy(clients={"alice": ClientSpec(max_pending_bytes=150)})
    world.core.named(ONE, "alice")
    world.ask("a0", client=ONE, body=bytes(100))
    world.ask("a1", client=ONE, body=bytes(100))
    world.core.settings({"clients": {}})
    world.ask("a2", client=ONE, body=bytes(100))

    assert [world.codes(f"a{i}", ONE) for i in range(3)] == [[], ["overloaded"], []]


def test_a_tenant_lives_as_long_as_any_connection_or_request_of_it() -> None:
    world = busy()
    world.core.named(ONE, "alice")
    world.core.named(TWO, "alice")
    (alice,) = {t for t in world.core.connections.tenants() if t.name}
    world.core.gone(ONE, world.now)
    world.core.named(b"three", "alice")
    assert alice in world.core.connections.tenants()
    del alice
    for client in (TWO, b"three"):
        world.core.gone(client, world.now)
    gc.collect()

    assert not world.core.connections._named
