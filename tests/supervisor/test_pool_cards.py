"""What the pool does about its cards, in virtual time."""

from __future__ import annotations

from gpupool.supervisor import commands as cmd
from gpupool.supervisor import events as ev
from gpupool.supervisor.pool import Pool
from support.world import POLICY, World


def judged(slot: int, *, lost: bool = True) -> ev.CardJudged:
    return ev.CardJudged(slot, lost=lost, reason="XID 79: fell off the bus", needs="power_cycle")


def test_a_lost_card_ends_its_worker_blames_nobody_and_degrades_in_the_same_call() -> None:
    world = World(slots=4).start()
    world.feed(judged(1))
    assert world.states() == ["ready", "lost", "ready", "ready"]
    lost = world.told("lost")[0]
    assert (lost["slot"], lost["blame"], lost["kind"]) == (1, False, "card")
    limits = [c for c in world.log if isinstance(c, cmd.SetLimits)]
    assert limits[-1].batch_factors == (0.75,) * 4
    assert [c.signal for c in world.log if isinstance(c, cmd.SignalWorker)] == ["SIGKILL"]


def test_nothing_is_started_on_a_judged_card_until_it_is_readmitted() -> None:
    world = World().start()
    world.feed(judged(0, lost=False))
    world.run(2000.0)
    assert world.states()[0] == "quarantined"
    assert len(world.spawns) == 2
    assert "power_cycle" in (world.pool.refusal("restart", 0) or "")
    world.feed(ev.CardReadmitted(0, "a reset was seen"))
    world.run(2.0)
    assert world.states()[0] == "ready"


def test_a_card_judged_in_an_earlier_run_gets_no_process_at_all() -> None:
    world = World()
    world.feed(judged(0, lost=False))
    world.start()
    assert world.states() == ["quarantined", "ready"]
    assert [slot for _, slot in world.spawns] == [1]


def test_a_card_that_is_back_before_its_process_has_ended_gets_a_new_one() -> None:
    world = World().start()
    world.processes[0].in_kernel = True
    world.feed(judged(0))
    assert world.states()[0] == "stopping"
    world.feed(ev.CardReadmitted(0, "it answers again"))
    world.kill(0)
    world.run(2.0)
    assert world.states()[0] == "ready"


def test_a_drained_card_that_is_readmitted_stays_drained() -> None:
    world = World().start()
    world.feed(ev.DrainAsked([0]))
    world.feed(judged(0))
    world.feed(ev.CardReadmitted(0, "back"))
    world.run(100.0)
    assert world.states()[0] == "stopped"


def test_a_condemned_worker_is_replaced_and_its_batch_is_suspect() -> None:
    world = World().start()
    world.feed(ev.WorkerCondemned(0, "XID 13"))
    assert world.told("lost")[0]["blame"] is True
    world.run(3.0)
    assert world.states()[0] == "ready"
    assert world.pool.slots[0].restarts == 1


def test_a_hot_card_gets_its_own_share_on_top_of_the_pools() -> None:
    world = World(slots=4).start()
    world.feed(ev.CardThrottled(2, 0.5, "hot"))
    world.kill(0)
    limits = [c for c in world.log if isinstance(c, cmd.SetLimits)]
    assert limits[0].batch_factors == (1.0, 1.0, 0.5, 1.0)
    assert limits[1].batch_factors == (0.75, 0.75, 0.375, 0.75)


def test_a_gate_postpones_a_start_and_says_why_once() -> None:
    world = World()
    refusal: list[str | None] = ["its card still holds 3 GiB"]
    world.pool = Pool(2, POLICY, world.pool.workers._rng, lambda slot, _: refusal[0] if slot == 0 else None)
    world.start()
    assert world.states() == ["backing_off", "ready"]
    assert world.pool.slots[0].reason == "its card still holds 3 GiB"
    world.run(10.0)
    assert len([c for c in world.log if isinstance(c, cmd.Report) and c.event == "start_postponed"]) == 1
    refusal[0] = None
    world.run(3.0)
    assert world.states() == ["ready", "ready"]


def test_release_finishes_the_work_ends_the_process_and_resume_takes_the_device_back() -> None:
    world = World().start()
    world.busy.add(0)
    world.feed(ev.ReleaseAsked([0]))
    world.run(2.0)
    assert world.states()[0] == "draining"
    world.busy.clear()
    world.feed(ev.WorkerIdle(0))
    world.run(1000.0)
    assert (world.states()[0], world.pool.slots[0].pid) == ("stopped", None)
    world.feed(ev.ResumeAsked([0]))
    world.run(2.0)
    assert world.states()[0] == "ready"
    assert world.router_held == set()


def test_many_starts_are_spread_over_time() -> None:
    world = World(slots=8)
    world.feed(ev.Started())
    world.run(5.0)
    times = [at for at, _ in world.spawns]
    assert len(times) == 8
    assert all(sum(t <= at < t + 0.99 for at in times) <= 7 for t in times)
    assert times[7] - times[0] >= 1.0


def test_drains_of_an_earlier_run_hold() -> None:
    world = World()
    world.feed(ev.Started(held=[1]))
    world.run(3.0)
    assert world.states() == ["ready", "drained"]
