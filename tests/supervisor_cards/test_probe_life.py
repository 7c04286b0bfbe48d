"""The probe's process: silence, delays, and processes that SIGKILL does not end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.cards.probe_life import MAX_STUCK, KillProbe, ProbeCommand, ProbeLife, SpawnProbe


def started() -> ProbeLife:
    life = ProbeLife()
    assert life.start(0.0) == [SpawnProbe(1, "start")]
    return life


def until_command(life: ProbeLife, now: float, *, speaks: bool = False) -> tuple[list[ProbeCommand], float]:
    """Tick each second until something is to be done."""
    for _ in range(1000):
        now += 1.0
        if speaks:
            life.heard(life.epoch, now)
        if commands := life.tick(now):
            return commands, now
    raise AssertionError("nothing happens")


def test_a_probe_that_speaks_is_left_alone() -> None:
    life = started()
    for now in range(1, 1000):
        assert life.heard(1, float(now))
        assert life.tick(now + 0.5) == []


def test_silence_of_five_seconds_kills_and_the_first_word_may_take_thirty() -> None:
    life = started()
    assert life.tick(29.9) == []
    life.heard(1, 29.9)
    assert life.tick(34.8) == []
    assert life.tick(34.9) == [KillProbe(1, "no message for 5 s")]
    assert started().tick(30.0) == [KillProbe(1, "no message for 30 s")]


def test_delays_grow_to_a_minute_and_begin_anew_after_a_stable_time() -> None:
    life, now = started(), 0.0
    delays = []
    for epoch in range(1, 7):
        life.ended(epoch, now)
        commands, then = until_command(life, now)
        assert commands == [SpawnProbe(epoch + 1, "back-off is over")]
        delays.append(then - now)
        now = then
    assert delays == [5.0, 10.0, 30.0, 60.0, 60.0, 60.0]
    for _ in range(200):
        now += 1.0
        life.heard(7, now)
        assert life.tick(now) == []
    life.ended(7, now)
    assert until_command(life, now)[1] == now + 5.0


def test_a_probe_that_cannot_be_started_is_tried_again() -> None:
    life = started()
    life.ended(1, 0.0)
    assert until_command(life, 0.0) == ([SpawnProbe(2, "back-off is over")], 5.0)


def test_a_pause_of_the_supervisor_is_not_the_probes_silence() -> None:
    life = started()
    life.heard(1, 1.0)
    assert life.tick(500.0, late_s=499.0) == []
    assert life.tick(504.9) == []
    assert life.tick(505.0) == [KillProbe(1, "no message for 5 s")]


def test_one_that_was_given_up_is_not_believed_any_more() -> None:
    life = started()
    life.heard(1, 1.0)
    life.tick(6.0)
    assert not life.heard(1, 6.5)
    until_command(life, 6.0)
    assert life.epoch == 2
    assert not life.heard(1, 12.0)
    life.ended(1, 12.0)  # the end of the old one is not the end of the new one
    assert life.heard(2, 12.0)


def test_processes_that_do_not_die_are_replaced_a_few_times_and_then_waited_for() -> None:
    life, now = started(), 0.0
    for epoch in range(1, MAX_STUCK + 1):
        commands, now = until_command(life, now)
        assert commands == [KillProbe(epoch, "no message for 30 s")]
        if epoch < MAX_STUCK:
            commands, now = until_command(life, now)
            assert commands == [SpawnProbe(epoch + 1, "back-off is over")]
    assert all(life.tick(now + n) == [] for n in range(10_000))
    life.ended(1, now + 10_000)
    assert life.tick(now + 10_000) == [SpawnProbe(MAX_STUCK + 1, "back-off is over")]


def test_stopping_ends_it_for_good() -> None:
    life = started()
    assert life.stop() == [KillProbe(1, "the pool stops")]
    life.ended(1, 1.0)
    assert life.tick(1000.0) == []
    assert life.stop() == []


@given(
    st.lists(st.tuples(st.sampled_from(["heard", "ended", "tick", "late"]), st.integers(0, 3), st.floats(0, 100)), max_size=100)
)
def test_one_probe_is_believed_and_few_are_alive(steps: list[tuple[str, int, float]]) -> None:
    life, now, alive, last_spawn = ProbeLife(), 0.0, {1}, 0.0
    life.start(now)
    for kind, back, gap in steps:
        now += gap
        epoch = life.epoch - back
        if kind == "heard":
            assert not (life.heard(epoch, now) and back)
        elif kind == "ended":
            alive.discard(epoch)
            life.ended(epoch, now)
        else:
            for command in life.tick(now, late_s=50.0 if kind == "late" else 0.0):
                if isinstance(command, SpawnProbe):
                    assert now - last_spawn >= 5.0
                    alive.add(command.epoch)
                    last_spawn = now
        assert len(alive) <= MAX_STUCK + 1
