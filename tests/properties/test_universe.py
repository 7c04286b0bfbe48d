"""Random schedules of a whole pool in virtual time: whatever comes together, every promise is kept at every step.

A schedule is a list of deeds of clients, operators and fate, with time or a number of events between them. When it is over all faults
end, and the pool must come back to its full capacity and have answered everybody. Many schedules end in a stop instead.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.universe import GRACES_S, Universe

SCHEDULES = 1000  # per size of the pool

Deed = Callable[[Universe], None]

_SLOT = st.integers(0, 3)
_KINDS = st.sampled_from(["ok", "ok", "ok", "slow", "poison", "ok", "bad", "broken", "slow", "poison", "hang"])


class Named:
    """A deed with words, so that a failing schedule can be read."""

    def __init__(self, words: str, act: Deed) -> None:
        self.words, self.act = words, act

    def __repr__(self) -> str:
        return self.words


def _wait(seconds: float) -> Named:
    return Named(f"wait {seconds:.3f} s", lambda u: u.run(seconds))


def _steps(count: int) -> Named:
    return Named(f"{count} events", lambda u: u.steps(count))


def _ask(kind: str, count: int, model: int, rows: int, priority: int, timeout_s: float, retry: bool) -> Named:
    def act(u: Universe) -> None:
        for _ in range(count):
            u.ask(kind, model=model, rows=rows, priority=priority, timeout_s=timeout_s, retry=retry)

    words = f"ask {count} x {kind}, model {model}, {rows} rows, priority {priority}, {timeout_s} s"
    return Named(words + ("" if retry else ", not twice"), act)


def _operate(verb: str, slot: int) -> Named:
    return Named(f"{verb} {slot}", lambda u: u.operate(verb, slot % len(u.board)))


def _happen(what: str, slot: int) -> Named:
    def act(u: Universe) -> None:
        n = slot % len(u.board)
        match what:
            case "kill":
                u.kill(n)
            case "exit 0" | "exit 1" | "exit 75":
                u.kill(n, int(what.split()[1]))
            case "freeze":
                u.freeze(n)
            case "thaw":
                u.thaw(n)
            case "stick":
                u.stick(n)
            case "let go":
                u.let_go(n)
            case "loads fail":
                u.loads_fail.add(n)
            case "loads hang":
                u.loads_hang.add(n)
            case "spawns fail":
                u.spawns_fail.add(n)
            case "mend":
                for faults in (u.loads_fail, u.loads_hang, u.spawns_fail):
                    faults.discard(n)
            case "leak":
                u.leak(n)
            case "doom":
                u.doom(n)
            case "router dies":
                u.router_dies()
            case "router freezes":
                u.freeze_router()
            case "router thaws":
                u.thaw_router()

    return Named(f"{what} {slot}", act)


def _pause(seconds: float) -> Named:
    return Named(f"the host pauses {seconds:.1f} s", lambda u: u.pause(seconds))


def _stall(seconds: float) -> Named:
    return Named(f"the supervisor stalls {seconds:.2f} s", lambda u: u.stall(seconds))


def _cancel(index: int) -> Named:
    return Named(f"cancel {index}", lambda u: u.cancel(index))


_FATES = (
    "kill", "kill", "exit 0", "exit 1", "exit 75", "freeze", "freeze", "thaw", "thaw", "stick", "let go", "loads fail", "loads hang",
    "leak", "leak", "spawns fail", "mend", "mend", "router dies", "router freezes", "router thaws", "router thaws", "doom", "doom",
)  # fmt: skip
DEEDS = st.one_of(
    st.just(Named("nothing", lambda _: None)),
    st.builds(_wait, st.sampled_from([0.003, 0.02, 0.1, 0.5, 1.0, 1.0, 3.0])),
    st.builds(_wait, st.sampled_from([0.01, 0.3, 2.0])),
    st.builds(_steps, st.integers(1, 30)),
    st.builds(
        _ask, _KINDS, st.integers(1, 6), st.integers(0, 1), st.sampled_from([1, 1, 1, 2, 9]), st.integers(0, 9),
        st.sampled_from([8.0, 0.05, 0.5, 3.0, 8.0]), st.sampled_from([True, True, False]),
    ),
    st.builds(_ask, _KINDS, st.integers(1, 3), st.just(0), st.just(1), st.just(5), st.just(20.0), st.just(value=True)),
    st.builds(_ask, _KINDS, st.integers(1, 6), st.just(0), st.just(1), st.just(5), st.just(8.0), st.just(value=True)),
    st.builds(_ask, st.just("slow"), st.just(20), st.just(0), st.just(1), st.integers(0, 9), st.just(20.0), st.just(value=True)),
    st.builds(_operate, st.sampled_from(["drain", "resume", "restart", "force"]), _SLOT),
    st.builds(_happen, st.sampled_from(_FATES), _SLOT),
    st.builds(_pause, st.sampled_from([0.3, 2.0, 20.0])),
    st.builds(_stall, st.sampled_from([0.05, 0.4, 1.5, 5.0])),
    st.builds(_cancel, st.integers(0, 20)),
)  # fmt: skip
#: What follows upon the schedule: mostly healing, else a stop that is asked for once or twice, while `late` deeds go on.
ENDS = st.sampled_from(["heal", "heal", "heal", "stop", "stop twice"])


@pytest.mark.parametrize(("slots", "overflow"), [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1)])
def test_every_promise_is_kept_in_every_schedule(slots: int, overflow: int) -> None:
    overflowed = []

    @settings(
        max_examples=SCHEDULES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        seed=st.integers(0, 1 << 16), warm=st.booleans(), attempts=st.sampled_from([1, 2, 2, 2, 3]),
        deeds=st.lists(DEEDS, min_size=15, max_size=45), end=ENDS, late=st.lists(DEEDS, max_size=4),
    )  # fmt: skip
    def schedule(seed: int, warm: bool, attempts: int, deeds: list[Named], end: str, late: list[Named]) -> None:
        universe = Universe(slots, seed, overflow=overflow, max_attempts=attempts)
        if warm:
            universe.run(3.0)
        for deed in deeds:
            deed.act(universe)
        if end == "heal":
            _heal(universe, attempts)
        _stop(universe, [] if end == "heal" else late, twice=end == "stop twice")
        overflowed.append(universe.overflowed)

    schedule()
    assert not overflow or sum(map(bool, overflowed)) > SCHEDULES / 50, "hardly anything went to the overflow workers"


def _heal(universe: Universe, attempts: int) -> None:
    """After the last fault all comes back, and works."""
    universe.heal()
    universe.run(4.0)  # a batch that hung before is noticed within this
    for _ in range(120):
        if universe.quit_code is not None:
            break
        if universe.whole:
            break
        universe.run(0.5)
    universe.run(6.0)  # far less than the longest patience of a client: nobody is answered only because time ran out
    if universe.quit_code is not None:  # a router that is killed five times before the pool was ever ready
        assert not universe.pool.ever_ready
        return
    assert not universe.witness.unanswered(), [a.id for a in universe.witness.unanswered()]
    assert universe.whole, [(s.number, s.state, s.reason) for s in universe.pool.slots]
    probes = [universe.ask() for _ in range(8 * len(universe.board))]
    universe.run(3.0)
    assert {tuple(p.codes) for p in probes} == {("ok",)}
    # A death once more: what it ran is run again, one by one, and nothing is left over from the deaths before.
    again = [universe.ask("slow", timeout_s=30.0) for _ in range(4)]
    universe.run(0.1)
    slot, _ = next(where for ask in again for where in ask.at)
    universe.kill(slot)
    universe.run(12.0)
    codes = {tuple(a.codes) for a in again}
    assert codes <= {("ok",), ("worker_lost",), ("no_workers",)}
    assert codes == {("ok",)} or attempts == 1 or len(universe.pool.counted) == 1  # a lone worker that dies too often is parked


def _stop(universe: Universe, late: list[Named], *, twice: bool) -> None:
    """Whatever happens meanwhile, the pool ends in time and has answered all that it had heard of."""
    if universe.quit_code is not None:
        return
    universe.stop()
    asked_at, paused_s = universe.time.now, universe.time.paused_s
    for deed in late:
        deed.act(universe)
    if twice:
        universe.stop()
    stood_s = universe.time.paused_s - paused_s
    universe.run(max(0.0, asked_at + GRACES_S + stood_s + 2.0 - universe.time.now))
    assert universe.quit_code == 0, (universe.quit_code, [(s.number, s.state) for s in universe.pool.slots])
    assert not universe.witness.unanswered(), [a.id for a in universe.witness.unanswered()]
