"""Overflow slots are supervised like others and count for nothing."""

from __future__ import annotations

from dataclasses import replace

from gpupool.exits import Exit
from gpupool.supervisor import events as ev
from gpupool.supervisor.pool import PoolState
from support.world import POLICY, World


def test_one_that_cannot_start_parks_and_the_pool_is_whole() -> None:
    world = World(slots=3, overflow=1, fails_to_load={2}, exit_code=Exit.BAD_CONFIG).start()
    world.run(10)

    assert world.states() == ["ready", "ready", "parked"]
    assert world.pool.ready
    assert not world.pool.degraded
    assert world.pool.factors.batch == 1.0
    assert world.quit_code is None
    assert world.told("expect")[-1]["ready"] == 2


def test_one_that_dies_is_started_again_and_shrinks_nothing() -> None:
    world = World(slots=2, overflow=1).start()
    world.kill(1)

    assert world.pool.factors.batch == 1.0
    assert not world.pool.degraded
    world.run(20)
    assert world.states() == ["ready", "ready"]
    assert world.pool.slots[1].incarnation == 2


def test_it_makes_no_pool_ready() -> None:
    world = World(slots=2, overflow=1, fails_to_load={0}).start()
    world.run(5)

    assert world.states()[1] == "ready"
    assert not world.pool.ready
    assert world.pool.ready_count == 0
    assert world.pool.state != PoolState.READY


def test_a_configuration_with_which_no_counted_worker_can_start_ends_the_pool() -> None:
    world = World(slots=2, overflow=1, fails_to_load={0}, exit_code=Exit.BAD_CONFIG).start()
    world.run(5)
    assert world.quit_code == Exit.BAD_CONFIG


def test_it_can_be_steered_like_others() -> None:
    world = World(slots=2, overflow=1).start()
    world.feed(ev.DrainAsked([1]))
    world.run(1)
    assert world.states() == ["ready", "drained"]
    assert world.pool.state == PoolState.READY
    world.feed(ev.ResumeAsked([1]))
    world.feed(ev.RestartAsked([1]))
    world.run(5)
    assert world.states() == ["ready", "ready"]
    assert world.pool.slots[1].incarnation == 2


def test_it_is_renewed_though_the_pool_could_spare_no_other() -> None:
    world = World(slots=2, overflow=1, policy=replace(POLICY, recycle_on_leak=True)).start()
    for slot in range(2):
        world.feed(ev.LeakJudged(slot, 1, "host", suspected=True, bytes_per_hour=1, growth_bytes=1, worked_s=1.0))
    world.run(60)
    assert [s.incarnation for s in world.pool.slots] == [1, 2]


def test_the_pool_stops_with_it() -> None:
    world = World(slots=2, overflow=1).start()
    world.feed(ev.StopAsked())
    world.run(5)
    assert world.quit_code == 0
