"""Processes that are renewed by themselves: one after the other, and only while the rest is well."""

from __future__ import annotations

import itertools
from dataclasses import replace

from gpupool.supervisor import commands as cmd
from gpupool.supervisor import events as ev
from gpupool.supervisor.recycling import PAUSE_S
from support.world import POLICY, World

RECYCLES = replace(POLICY, recycle_on_leak=True)


def leak(world: World, slot: int, *, suspected: bool = True, kind: str = "host") -> None:
    incarnation = world.pool.slots[slot].incarnation
    world.feed(ev.LeakJudged(slot, incarnation, kind, suspected, bytes_per_hour=1 << 30, growth_bytes=1 << 29, worked_s=60.0))


def reports(world: World, event: str) -> list[int | None]:
    return [c.slot for c in world.log if isinstance(c, cmd.Report) and c.event == event]


def test_a_suspicion_is_told_and_nothing_else_unless_configured() -> None:
    world = World(slots=2).start()

    leak(world, 1)
    world.run(60)

    assert reports(world, "memory_leak_suspected") == [1]
    assert [s.incarnation for s in world.pool.slots] == [1, 1]


def test_leaking_workers_are_renewed_one_after_the_other() -> None:
    world = World(slots=3, policy=RECYCLES).start()
    began = world.now
    for slot in range(3):
        leak(world, slot)
    fewest = 3
    for _ in range(400):
        world.run(0.2)
        fewest = min(fewest, world.pool.ready_count)

    assert fewest == 2
    assert [s.incarnation for s in world.pool.slots] == [2, 2, 2]
    spawned = [at for at, _ in world.spawns if at > began]
    assert all(later - earlier >= PAUSE_S for earlier, later in itertools.pairwise(spawned))
    assert not reports(world, "worker_exited")
    assert world.pool.workers.ends == {(n, "recycle"): 1 for n in range(3)}
    assert world.pool.factors.batch == 1.0


def test_work_that_was_accepted_is_finished_first() -> None:
    world = World(slots=2, policy=RECYCLES).start()
    world.busy.add(0)
    leak(world, 0)
    world.run(5)
    assert world.states() == ["draining", "ready"]

    world.busy.clear()
    world.feed(ev.WorkerIdle(0))
    world.run(5)

    assert world.states() == ["ready", "ready"]
    assert world.pool.slots[0].incarnation == 2


def test_the_last_workers_that_the_pool_needs_are_never_renewed() -> None:
    world = World(slots=2, policy=replace(RECYCLES, min_ready=2)).start()
    leak(world, 0)
    world.run(60)
    assert world.pool.slots[0].incarnation == 1

    world.feed(ev.PolicyChanged(RECYCLES))
    world.run(10)
    assert world.pool.slots[0].incarnation == 2


def test_nothing_is_renewed_while_another_worker_is_missing() -> None:
    world = World(slots=3, policy=RECYCLES).start()
    world.feed(ev.DrainAsked([2]))
    leak(world, 0)
    world.run(60)
    assert world.pool.slots[0].incarnation == 1

    world.feed(ev.ResumeAsked([2]))
    world.run(10)
    assert world.pool.slots[0].incarnation == 2


def test_a_renewal_is_called_off_when_another_worker_drops_out_meanwhile() -> None:
    world = World(slots=2, policy=RECYCLES).start()
    world.busy.add(0)
    leak(world, 0)
    world.run(1)
    world.kill(1)
    world.run(0.4)

    assert reports(world, "worker_recycle_called_off") == [0]
    assert world.states()[0] == "ready"
    assert world.router_held == set()
    world.busy.clear()
    world.run(30)
    assert world.pool.slots[0].incarnation == 2


def test_a_suspicion_that_ends_in_time_costs_nothing() -> None:
    world = World(slots=2, policy=RECYCLES).start()
    world.feed(ev.DrainAsked([1]))
    leak(world, 0)
    world.run(1)
    leak(world, 0, suspected=False)
    world.feed(ev.ResumeAsked([1]))
    world.run(60)

    assert world.pool.slots[0].incarnation == 1


def test_a_suspicion_of_a_process_that_is_gone_concerns_nobody() -> None:
    world = World(slots=2, policy=RECYCLES).start()
    world.kill(0)
    world.feed(ev.LeakJudged(0, 1, "host", suspected=True, bytes_per_hour=1, growth_bytes=1, worked_s=1.0))
    world.run(60)

    assert world.pool.slots[0].incarnation == 2


def test_a_successor_that_cannot_start_ends_the_renewals_until_it_is_mended() -> None:
    world = World(slots=3, policy=RECYCLES).start()
    leak(world, 0)
    leak(world, 1)
    world.fails_to_load.add(0)
    world.run(400)
    assert world.states() == ["parked", "ready", "ready"]
    assert world.pool.slots[1].incarnation == 1

    world.fails_to_load.clear()
    world.feed(ev.ResumeAsked([0]))
    world.run(30)
    assert world.pool.slots[1].incarnation == 2


def test_an_operator_can_take_over_a_renewal() -> None:
    world = World(slots=2, policy=RECYCLES).start()
    world.busy.add(0)
    leak(world, 0)
    world.run(1)
    world.feed(ev.ReleaseAsked([0]))
    world.busy.clear()
    world.feed(ev.WorkerIdle(0))
    world.run(5)
    assert world.states() == ["stopped", "ready"]
    world.feed(ev.ResumeAsked([0]))
    world.run(5)
    leak(world, 1)
    world.run(20)
    assert [s.incarnation for s in world.pool.slots] == [2, 2]


def test_workers_that_have_run_enough_batches_are_renewed_though_they_reach_it_together() -> None:
    world = World(slots=3, policy=replace(POLICY, recycle_after_batches=100)).start()
    for process in world.processes.values():
        process.batches = 100
    fewest = 3
    for _ in range(200):
        world.run(0.2)
        fewest = min(fewest, world.pool.ready_count)

    assert fewest == 2
    assert [s.incarnation for s in world.pool.slots] == [2, 2, 2]
