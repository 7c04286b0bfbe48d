"""The pool's decisions, in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpupool.board import Phase
from gpupool.exits import Exit
from gpupool.supervisor import commands as cmd
from gpupool.supervisor import events as ev
from gpupool.supervisor.lifecycle import ALIVE
from gpupool.supervisor.pool import Pool, PoolState
from support.world import POLICY, World


def test_a_pool_is_ready_when_its_workers_have_joined_not_when_they_have_started() -> None:
    world = World(load_s=8.0)
    world.feed(ev.Started())
    world.run(7.0)
    assert not world.pool.ready
    assert world.states() == ["loading", "loading"]
    world.run(2.0)
    assert world.pool.ready
    assert world.pool.state == PoolState.READY


def test_no_worker_at_all_is_not_ready() -> None:
    world = World(fails_to_load={0, 1}).start()
    world.run(300.0)
    assert not world.pool.ready


def test_a_killed_worker_is_replaced_at_once_and_its_batch_is_blamed() -> None:
    world = World().start()
    commands = world.kill(0)
    lost = next(c for c in commands if isinstance(c, cmd.TellRouter) and c.message["t"] == "lost")
    assert lost.message == {
        "t": "lost", "slot": 0, "incarnation": 1, "running": (1, 2), "blame": True, "reason": "killed from outside", "kind": "crash",
    }  # fmt: skip
    assert commands.index(lost) < next(i for i, c in enumerate(commands) if isinstance(c, cmd.SpawnWorker))
    world.run(2.0)
    assert world.states() == ["ready", "ready"]
    assert [s.restarts for s in world.pool.slots] == [1, 0]


def test_an_exit_with_code_zero_is_as_unexpected_as_any() -> None:
    world = World().start()
    world.kill(0, code=0)
    world.run(2.0)
    assert world.pool.slots[0].restarts == 1
    assert world.pool.slots[0].last_exit is not None


def test_limits_shrink_in_the_call_that_learns_of_a_death() -> None:
    world = World(slots=4).start()
    commands = world.kill(0)
    assert cmd.SetLimits((0.75,) * 4, 0.5, "3 of 4 workers are healthy") in commands
    world.run(20.0)
    assert world.pool.factors.batch == 1.0


def test_a_crash_loop_backs_off_and_then_parks_and_is_tried_again_later() -> None:
    world = World(slots=4, fails_to_load={1}).start()
    world.run(300.0)
    starts = [at for at, slot in world.spawns if slot == 1]
    assert 4 <= len(starts) <= 6
    assert all(b - a >= d for a, b, d in zip(starts[1:], starts[2:], (5.0, 30.0, 60.0), strict=False))
    world.run(300.0)
    assert world.states()[1] == "parked"
    assert world.pool.ready_count == 3
    before = len(world.spawns)
    world.run(400.0)
    assert len(world.spawns) == before
    world.fails_to_load.clear()
    world.run(600.0)
    assert world.states()[1] == "ready"


def test_a_half_open_try_that_fails_parks_again_at_once() -> None:
    world = World(fails_to_load={1}).start()
    world.run(600.0)
    assert world.states()[1] == "parked"
    before = len(world.spawns)
    world.run(905.0)
    assert len(world.spawns) == before + 1
    assert world.states()[1] == "parked"


def test_resume_unparks() -> None:
    world = World(fails_to_load={1}).start()
    world.run(600.0)
    world.fails_to_load.clear()
    world.feed(ev.ResumeAsked([1]))
    world.run(2.0)
    assert world.states()[1] == "ready"


def test_an_exit_that_no_restart_can_help_parks_at_once_and_the_pool_gives_up_if_all_are_so() -> None:
    world = World(fails_to_load={0, 1}, exit_code=Exit.BAD_CONFIG).start()
    assert len(world.spawns) == 2
    assert world.quit_code == Exit.BAD_CONFIG


def test_a_hung_batch_is_dumped_then_killed_and_replaced() -> None:
    world = World().start()
    process = world.processes[0]
    process.phase, process.phase_deadline = Phase.BATCH, world.now + 60.0
    world.run(59.0)
    assert world.states()[0] == "ready"
    world.run(2.0)
    signals = [c.signal for c in world.log if isinstance(c, cmd.SignalWorker)]
    assert signals == ["SIGABRT"]
    assert world.told("lost")[0]["blame"] is True
    world.run(2.0)
    assert world.states()[0] == "ready"


def test_a_frozen_worker_gets_no_new_work_and_is_not_killed_for_its_beat_alone() -> None:
    world = World().start()
    process = world.processes[0]
    process.frozen, process.phase, process.phase_deadline = True, Phase.BATCH, world.now + 60.0
    world.run(30.0)
    assert world.told("avoid") == [{"t": "avoid", "slot": 0, "on": True}]
    assert not [c for c in world.log if isinstance(c, cmd.SignalWorker)]
    process.frozen = False
    world.run(1.0)
    assert world.told("avoid")[-1] == {"t": "avoid", "slot": 0, "on": False}
    process.phase = Phase.IDLE
    world.run(100.0)
    assert world.pool.slots[0].restarts == 0


def test_a_process_that_survives_sigkill_blocks_its_card_and_nothing_else() -> None:
    world = World().start()
    process = world.processes[0]
    process.in_kernel, process.phase, process.phase_deadline = True, Phase.BATCH, world.now + 1.0
    world.run(20.0)
    assert world.states() == ["unkillable", "ready"]
    assert world.pool.refusal("restart", 0)
    world.feed(ev.StopAsked())
    world.run(5.0)
    assert world.quit_code == Exit.OK


def test_a_pause_of_the_host_kills_nobody() -> None:
    world = World().start()
    for process in world.processes.values():
        process.phase, process.phase_deadline, process.frozen = Phase.BATCH, world.now + 60.0, True
    world.now += 3600.0
    world.feed(ev.Tick([world.record(0), world.record(1)], late_s=3600.0))
    for process in world.processes.values():
        process.phase, process.frozen = Phase.IDLE, False
    world.run(10.0)
    assert [s.restarts for s in world.pool.slots] == [0, 0]


def test_drain_finishes_what_is_accepted_and_the_process_stays() -> None:
    world = World().start()
    world.busy.add(1)
    world.feed(ev.DrainAsked([1]))
    world.run(5.0)
    assert world.states() == ["ready", "draining"]
    world.busy.clear()
    world.feed(ev.WorkerIdle(1))
    assert world.states() == ["ready", "drained"]
    assert world.pool.degraded
    assert world.pool.ready
    world.feed(ev.ResumeAsked([1]))
    assert world.states() == ["ready", "ready"]
    assert len(world.spawns) == 2


def test_drained_by_wish_is_no_reason_to_degrade_limits() -> None:
    world = World().start()
    world.feed(ev.DrainAsked([1]))
    world.run(5.0)
    assert world.pool.factors.batch == 1.0


def test_a_drained_worker_that_dies_is_not_revived_until_it_is_resumed() -> None:
    world = World().start()
    world.busy.add(1)
    world.feed(ev.DrainAsked([1]))
    world.kill(1)
    world.run(600.0)
    assert world.states()[1] == "stopped"
    world.feed(ev.ResumeAsked([1]))
    world.run(2.0)
    assert world.states()[1] == "ready"
    assert 1 not in world.router_held


def test_a_planned_restart_drains_first_and_is_no_crash() -> None:
    world = World().start()
    world.busy.add(0)
    world.feed(ev.RestartAsked([0]))
    world.run(3.0)
    assert world.states()[0] == "draining"
    world.busy.clear()
    world.feed(ev.WorkerIdle(0))
    world.run(2.0)
    slot = world.pool.slots[0]
    assert (slot.state, slot.incarnation, len(slot.history.deaths)) == ("ready", 2, 0)
    assert world.told("lost")[0]["blame"] is False
    assert world.pool.factors.batch == 1.0


def test_a_restarted_worker_gets_work_again() -> None:
    world = World().start()
    world.feed(ev.RestartAsked([0]))
    world.run(3.0)
    assert world.states()[0] == "ready"
    assert 0 not in world.router_held


def test_a_planned_restart_does_not_wait_for_ever() -> None:
    world = World().start()
    world.busy.add(0)
    world.feed(ev.RestartAsked([0]))
    world.run(POLICY.drain_timeout_s + 3.0)
    assert world.pool.slots[0].incarnation == 2


def test_a_restart_that_races_a_crash_starts_one_process() -> None:
    world = World().start()
    world.busy.add(0)
    world.feed(ev.RestartAsked([0]))
    world.kill(0)
    world.run(3.0)
    assert world.pool.slots[0].incarnation == 2
    assert world.states()[0] == "ready"


def test_a_hang_while_a_restart_drains_ends_in_a_worker_that_serves() -> None:
    world = World(slots=1).start()
    world.busy.add(0)
    world.processes[0].phase, world.processes[0].phase_deadline = Phase.BATCH, world.now + 5.0
    world.feed(ev.RestartAsked([0]))
    assert world.router_held == {0}
    world.run(20.0)
    assert world.states() == ["ready"]
    assert world.router_held == set()


def test_resume_while_a_drained_worker_loads_is_not_lost() -> None:
    world = World()
    world.feed(ev.Started(held=[1]))
    world.feed(ev.ResumeAsked([1]))
    world.run(3.0)
    assert world.states() == ["ready", "ready"]
    assert world.router_held == set()


def test_a_drained_worker_is_not_started_for_a_half_open_try() -> None:
    world = World(fails_to_load={1}).start()
    world.run(600.0)
    assert world.states()[1] == "parked"
    world.feed(ev.DrainAsked([1]))
    before = len(world.spawns)
    world.run(2000.0)
    assert len(world.spawns) == before


def test_an_exit_code_of_the_models_own_choosing_does_not_park_for_ever() -> None:
    world = World().start()
    world.kill(0, code=int(Exit.BAD_CONFIG))
    world.run(3.0)
    assert world.states() == ["ready", "ready"]


def test_a_crash_while_a_restart_is_asked_for_is_blamed_all_the_same() -> None:
    world = World().start()
    world.busy.add(0)
    world.feed(ev.RestartAsked([0]))
    world.kill(0, signal="SIGSEGV")
    assert world.told("lost")[0]["blame"] is True


def test_an_older_incarnation_is_ignored() -> None:
    world = World().start()
    world.kill(0)
    world.run(2.0)
    assert world.feed(ev.WorkerExited(0, 1, ev.Exit(1), ())) == []
    assert world.states()[0] == "ready"


def test_stop_finishes_the_work_then_the_workers_then_the_router() -> None:
    world = World().start()
    world.busy.add(0)
    world.feed(ev.StopAsked())
    world.run(5.0)
    assert world.states() == ["ready", "ready"]
    world.busy.clear()
    world.run(1.0)
    kinds = [
        c.message["t"] if isinstance(c, cmd.TellRouter) else type(c).__name__ for c in world.log
        if isinstance(c, cmd.SignalWorker | cmd.Quit) or (isinstance(c, cmd.TellRouter) and c.message["t"] in ("drain", "stop"))
    ]  # fmt: skip
    assert kinds == ["drain", "SignalWorker", "SignalWorker", "stop", "Quit"]
    assert world.quit_code == Exit.OK


def test_a_stuck_request_does_not_hold_the_stop_beyond_its_limit() -> None:
    world = World().start()
    world.busy.add(0)
    world.processes[0].phase, world.processes[0].phase_deadline = Phase.BATCH, world.now + 1e6
    world.feed(ev.StopAsked())
    world.run(POLICY.drain_timeout_s - 1.0)
    assert world.quit_code is None
    world.run(3.0)
    assert world.quit_code == Exit.OK


def test_a_second_stop_shortens_the_drain() -> None:
    world = World().start()
    world.busy.add(0)
    world.feed(ev.StopAsked())
    world.run(1.0)
    world.feed(ev.StopAsked())
    world.run(1.0)
    assert world.quit_code == Exit.OK


def test_a_router_that_dies_is_replaced_and_told_everything_again() -> None:
    world = World().start()
    world.feed(ev.DrainAsked([1]))
    world.router_held.clear()
    world.feed(ev.RouterExited(1, ev.Exit(None, "SIGKILL", "killed")))
    assert world.pool.router.epoch == 2
    assert not world.pool.ready
    assert world.router_held == {1}
    world.feed(ev.WorkerJoined(0, 1))
    assert world.pool.ready


def test_a_new_router_is_told_of_ends_that_it_may_have_missed() -> None:
    """A worker can join the new router, get work and die before the supervisor hears that the router is up."""
    pool = Pool(1, POLICY, random.Random(1))
    pool.handle(ev.Started(), 0.0)
    pool.handle(ev.RouterUp(1, ["tcp://127.0.0.1:1"]), 0.1)
    pool.handle(ev.WorkerJoined(0, 1), 1.0)
    pool.handle(ev.DrainAsked([0]), 2.0)
    pool.handle(ev.RouterExited(1, ev.Exit(None, "SIGKILL", "killed")), 3.0)
    unheard = pool.handle(ev.WorkerExited(0, 1, ev.Exit(None, "SIGSEGV", "killed by SIGSEGV"), (7,)), 3.1)

    commands = pool.handle(ev.RouterUp(2, ["tcp://127.0.0.1:1"]), 3.2)

    assert not [c for c in unheard if isinstance(c, cmd.TellRouter)]
    lost = [c.message for c in commands if isinstance(c, cmd.TellRouter) and c.message["t"] == "lost"]
    assert [(m["slot"], m["incarnation"], m["running"], m["blame"]) for m in lost] == [(0, 1, (7,), True)]


def test_a_router_that_is_not_known_to_be_up_may_answer_before_the_pool_ends() -> None:
    """It may have bound a moment ago and hold a client's request; one that is killed answers nobody."""
    pool = Pool(1, POLICY, random.Random(1))
    pool.handle(ev.Started(), 0.0)
    pool.handle(ev.StopAsked(), 0.5)

    commands = pool.handle(ev.WorkerExited(0, 1, ev.Exit(0, None, "exit code 0"), ()), 0.6)

    assert commands == [cmd.TellRouter({"t": "stop"}, "all workers have stopped")]
    assert pool.handle(ev.RouterExited(1, ev.Exit(0, None, "exit code 0")), 0.7) == [
        cmd.CloseListeners("no router runs, and none will"),
        cmd.Quit(Exit.OK, "stopped"),
    ]


def test_who_comes_when_the_last_router_has_ended_is_refused_and_not_kept_for_the_workers_end() -> None:
    pool = Pool(1, POLICY, random.Random(1))
    pool.handle(ev.Started(), 0.0)
    pool.handle(ev.RouterUp(1, ["tcp://127.0.0.1:1"]), 0.1)
    pool.handle(ev.WorkerJoined(0, 1), 1.0)
    closes = cmd.CloseListeners("no router runs, and none will")

    assert closes not in pool.handle(ev.StopAsked(), 2.0)
    assert closes in pool.handle(ev.RouterExited(1, ev.Exit(None, "SIGKILL", "killed")), 2.1)
    assert pool.handle(ev.WorkerExited(0, 1, ev.Exit(0, None, "exit code 0"), ()), 3.0) == [cmd.Quit(Exit.OK, "stopped")]


def test_a_stop_between_two_routers_refuses_who_comes_at_once() -> None:
    pool = Pool(1, POLICY, random.Random(1))
    pool.handle(ev.Started(), 0.0)
    for epoch in (1, 2):
        commands = pool.handle(ev.RouterExited(epoch, ev.Exit(1, None, "exit code 1")), 0.1)
    assert cmd.SpawnRouter(3, "died") not in commands  # waits before it tries again

    assert cmd.CloseListeners("no router runs, and none will") in pool.handle(ev.StopAsked(), 0.2)


def test_a_router_that_never_comes_up_ends_the_pool_with_its_cause() -> None:
    world = World(router_starts=False).start()
    world.run(20.0)
    assert world.quit_code == Exit.FAILED
    quits = [c for c in world.log if isinstance(c, cmd.Quit)]
    assert quits[0].reason == "the router does not start: exit code 1"


def test_a_sick_worker_is_replaced_without_blaming_its_requests() -> None:
    world = World().start()
    world.feed(ev.WorkerSick(0, 1, "5 internal errors in a row"))
    world.run(3.0)
    assert world.pool.slots[0].incarnation == 2
    assert world.states()[0] == "ready"


def old_world(slots: int = 3) -> World:
    """All workers have served for longer than it takes to count as stable."""
    world = World(slots=slots).start()
    world.run(POLICY.restart.stable_after_s + 1.0)
    return world


def test_a_worker_that_asks_to_be_recycled_finishes_its_work_and_comes_back_without_a_death_on_its_record() -> None:
    world = old_world()
    for _ in range(POLICY.restart.max_restarts + 2):
        incarnation = world.pool.slots[0].incarnation
        world.feed(ev.RecycleAsked(0, incarnation, "out of memory 3 times in 10 s"))
        world.run(POLICY.restart.stable_after_s + 10.0)
        assert world.pool.slots[0].incarnation == incarnation + 1
        assert world.states() == ["ready"] * 3

    slot = world.pool.slots[0]
    assert slot.history.deaths == []
    assert slot.last_exit is not None
    assert slot.last_exit["planned"]
    assert world.pool.workers.ends == {(0, "recycle"): POLICY.restart.max_restarts + 2}
    assert not any(lost["blame"] for lost in world.told("lost"))


def test_never_two_workers_are_recycled_at_once() -> None:
    world = old_world()
    for number in range(3):
        world.feed(ev.RecycleAsked(number, 1, "it leaks"))

    for _ in range(600):
        world.run(0.1)
        assert world.states().count("ready") >= 2
    assert [s.incarnation for s in world.pool.slots] == [2, 2, 2]


def test_nobody_is_recycled_while_another_is_away_for_any_reason() -> None:
    world = old_world()
    world.kill(2)
    world.feed(ev.RecycleAsked(0, 1, "it leaks"))

    assert world.states()[0] == "ready"


def test_a_worker_is_not_recycled_over_and_over() -> None:
    world = old_world()
    world.feed(ev.RecycleAsked(0, 1, "it leaks"))
    world.run(20.0)
    world.feed(ev.RecycleAsked(0, 2, "it leaks"))

    assert world.states()[0] == "ready"


def test_a_recycle_that_was_asked_for_by_a_process_that_is_gone_is_none() -> None:
    world = old_world()
    world.kill(0)
    world.run(POLICY.restart.stable_after_s + 30.0)
    world.feed(ev.RecycleAsked(0, 1, "it leaks"))

    assert world.states()[0] == "ready"


def test_a_worker_that_turns_late_while_the_pool_drains_is_avoided() -> None:
    world = World().start()
    world.busy.update({0, 1})
    world.feed(ev.StopAsked())
    process = world.processes[0]
    process.frozen, process.phase, process.phase_deadline = True, Phase.BATCH, world.now + 60.0
    world.run(5.0)
    assert world.told("avoid") == [{"t": "avoid", "slot": 0, "on": True}]


def test_a_router_that_hangs_is_no_longer_ready_and_then_replaced() -> None:
    world = World().start()
    records = [world.record(n) for n in range(2)]
    beat = world.now
    world.now += 3.0
    world.feed(ev.Tick(records, 0.0, beat))
    assert not world.pool.ready
    assert world.pool.router.epoch == 1
    world.now += 3.0
    world.feed(ev.Tick(records, 0.0, beat))
    assert world.pool.router.epoch == 2
    assert [c.reason for c in world.log if isinstance(c, cmd.KillRouter)] == ["no beat for 6.0 s"]


def test_a_pause_of_the_supervisor_does_not_kill_the_router() -> None:
    world = World().start()
    records = [world.record(n) for n in range(2)]
    beat = world.now
    world.now += 100.0
    world.feed(ev.Tick(records, 99.0, beat))
    assert world.pool.ready
    assert world.pool.router.epoch == 1


def test_a_router_that_takes_no_message_is_replaced() -> None:
    world = World().start()
    world.feed(ev.RouterDeaf())
    assert world.pool.router.epoch == 2


class PoolMachine(RuleBasedStateMachine):
    """Random schedules: whatever happens, the invariants hold."""

    @initialize(slots=st.integers(1, 5), seed=st.integers(0, 1000))
    def begin(self, slots: int, seed: int) -> None:
        self.world = World(slots=slots, seed=seed, policy=replace(POLICY, drain_timeout_s=5.0)).start()

    def one(self, n: int) -> int:
        return n % self.world.slots

    @rule(n=st.integers(0, 9), code=st.sampled_from([None, 0, 1, 70, 75]))
    def worker_dies(self, n: int, code: int | None) -> None:
        if self.one(n) in self.world.processes:
            self.world.kill(self.one(n), code=code)

    @rule(n=st.integers(0, 9), frozen=st.booleans())
    def worker_freezes_or_thaws(self, n: int, frozen: bool) -> None:
        if process := self.world.processes.get(self.one(n)):
            process.frozen = frozen

    @rule(n=st.integers(0, 9), busy=st.booleans())
    def worker_has_work(self, n: int, busy: bool) -> None:
        slot = self.one(n)
        if busy and slot in self.world.processes:
            self.world.busy.add(slot)
        elif not busy and slot in self.world.busy:
            self.world.busy.discard(slot)
            if slot in self.world.router_held:
                self.world.feed(ev.WorkerIdle(slot))

    @rule(n=st.integers(0, 9), verb=st.sampled_from(["drain", "resume", "restart", "force"]))
    def operator_acts(self, n: int, verb: str) -> None:
        slot = self.one(n)
        if self.world.pool.refusal("restart" if verb == "force" else verb, slot) is None and self.world.quit_code is None:
            events: dict[str, ev.Event] = {
                "drain": ev.DrainAsked([slot]), "resume": ev.ResumeAsked([slot]), "restart": ev.RestartAsked([slot]),
                "force": ev.RestartAsked([slot], force=True),
            }  # fmt: skip
            self.world.feed(events[verb])

    @rule(n=st.integers(0, 9), hangs=st.booleans())
    def worker_runs_a_batch(self, n: int, hangs: bool) -> None:
        if (process := self.world.processes.get(self.one(n))) and process.joined:
            process.phase = Phase.BATCH if hangs else Phase.IDLE
            process.phase_deadline = self.world.now + 3.0 if hangs else 0.0

    @rule(slots=st.sets(st.integers(0, 4)))
    def models_break_or_heal(self, slots: set[int]) -> None:
        self.world.fails_to_load = slots

    @rule()
    def router_dies(self) -> None:
        if self.world.router_alive and self.world.quit_code is None:
            self.world.router_alive = False
            self.world.feed(ev.RouterExited(self.world.pool.router.epoch, ev.Exit(None, "SIGKILL", "killed")))
            for process in list(self.world.processes.values()):
                if process.joined and self.world.router_alive:
                    self.world.feed(ev.WorkerJoined(process.slot, process.incarnation))

    @rule(seconds=st.floats(0.2, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    @invariant()
    def a_slot_has_a_process_exactly_when_its_state_says_so(self) -> None:
        if self.world.quit_code is None:
            for slot in self.world.pool.slots:
                assert (slot.number in self.world.processes) == (slot.state in ALIVE)

    @invariant()
    def a_slot_that_serves_is_not_held_in_the_router(self) -> None:
        if self.world.quit_code is None and self.world.router_alive and self.world.pool.stop_asked_at is None:
            for slot in self.world.pool.slots:
                if slot.state == "ready":
                    assert slot.number not in self.world.router_held

    @invariant()
    def limits_never_exceed_what_is_configured(self) -> None:
        assert 0 < self.world.pool.factors.batch <= 1

    @invariant()
    def a_drained_worker_serves_nothing(self) -> None:
        for slot in self.world.pool.slots:
            if slot.held and self.world.router_alive:
                assert slot.state != "ready"

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.quit_code is None:
            self.world.feed(ev.StopAsked())
            self.world.run(60.0)
            assert self.world.quit_code == Exit.OK, self.world.states()


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolMachine = PoolMachine.TestCase
