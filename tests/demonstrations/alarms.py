"""One fault after another is done to a pool that a real Prometheus watches: each is told by its alert.

The rules' windows are made shorter (tests/support/prometheus.py), so times say that an alert comes, not when it would in earnest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from demonstrations.finding import Finding, equal, told
from support.fake_cards import BUSES, UUIDS, FakeCards
from support.prometheus import RunningPrometheus
from support.running import Load, RunningPool, until

_SUPPORT: Final = Path(__file__).parents[1] / "support"
_PATIENCE_S: Final = 30.0
_CONFIG: Final = """
[router]
max_pending = 300
[supervision]
heartbeat_interval_s = 0.1
heartbeat_timeout_s = 0.5
batch_timeout_s = 60.0
stop_timeout_s = 2.0
restart_delays_s = [0.0]
max_restarts = 4
"""


@dataclass
class Stage:
    """The pool, its pretended cards, and what is undone after each fault."""

    pool: RunningPool
    cards: FakeCards
    after: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def uuid(self, slot: int) -> str:
        """The card of a slot: slots are in bus order."""
        return UUIDS[sorted(range(len(UUIDS)), key=lambda n: BUSES[n])[slot]]

    def card(self, slot: int, said: str) -> None:
        """Change a card."""
        self.cards.say(f"gpu {self.uuid(slot)} {said}")

    def load(self, rate: float, sample: Any = None, **header: Any) -> Load:
        """Requests until the fault is over."""
        load = Load(self.pool, rate=rate, sample=sample, **header)
        self.after.callback(load.stop)
        return load

    def signal(self, slot: int, number: signal.Signals) -> None:
        """Send a worker a signal."""
        os.kill(self.pool.worker(slot)["pid"], number)


def _slow(at: Stage) -> None:
    at.load(20, {"i": 1, "do": "sleep", "s": 0.2})


def freeze(at: Stage) -> None:
    """Stop worker 0; it goes on afterwards."""
    at.after.callback(at.signal, 0, signal.SIGCONT)
    at.signal(0, signal.SIGSTOP)


def _fail(at: Stage) -> None:
    at.load(5, {"i": 1, "do": "raise"})


def _mistake(at: Stage) -> None:
    at.load(20, model="nobody")


def _exhaust(at: Stage) -> None:
    at.load(20, {"i": 1, "do": "oom"})


def _poison(at: Stage) -> None:
    with at.pool.client() as client:
        assert client.call({"i": 666, "do": "kill"}, within=20.0)[0]["code"] == "poison"


def _crash(at: Stage) -> None:
    for _ in range(3):
        incarnation = at.pool.worker(2)["incarnation"]
        at.signal(2, signal.SIGKILL)
        at.pool.wait_for_incarnation(2, incarnation + 1)


def _crash_on(at: Stage) -> None:
    while at.pool.wait(lambda s: s["workers"][2]["state"] in {"ready", "parked"})["workers"][2]["state"] == "ready":
        pid = at.pool.worker(2)["pid"]
        os.kill(pid, signal.SIGKILL)
        at.pool.wait(partial(_has_ended, pid))
    at.after.callback(at.pool.cli, "resume", "2")


def _has_ended(pid: int, status: dict[str, Any]) -> bool:
    return bool(status["workers"][2]["pid"] != pid)


def _kill_router(at: Stage) -> None:
    os.kill(at.pool.status()["router"]["pid"], signal.SIGKILL)


def spoil_configuration(at: Stage) -> None:
    """Reload with a key that is misspelt; the good file comes back afterwards."""
    text = at.pool.file.read_text()
    at.after.callback(at.pool.cli, "reload")
    at.after.callback(at.pool.file.write_text, text)
    at.pool.file.write_text(text + "\n[batching]\nmax_batsh = 1\n")
    assert at.pool.cli("reload").returncode == 1


def _xid(at: Stage) -> None:
    at.cards.say(f"event {at.uuid(0)} xid 63")


def heat(at: Stage) -> None:
    """Let the card of worker 0 be hot."""
    at.after.callback(at.card, 0, "throttle=0")
    at.card(0, "throttle=0x40")


def _fill(at: Stage) -> None:
    at.after.callback(at.card, 0, "mem_used=1024")
    at.card(0, "mem_used=80000")


def _idle(at: Stage) -> None:
    at.after.callback(at.card, 0, "util=50")
    at.card(0, "util=5")
    at.load(150, {"i": 1, "do": "sleep", "s": 0.1})


def _flood(at: Stage) -> None:
    at.load(800, {"i": 1, "do": "sleep", "s": 0.5})


def _judge(at: Stage) -> None:
    at.card(1, "recovery=1")
    at.cards.say(f"event {at.uuid(1)} xid 48")


def lose(at: Stage) -> None:
    """Let the card of worker 3 fall off the bus."""
    at.cards.say(f"event {at.uuid(3)} xid 79")
    at.card(3, "state=lost")


def _hang(at: Stage) -> None:
    at.cards.say("hang nvmlDeviceGetTemperature forever")


def _drain(at: Stage) -> None:
    assert at.pool.cli("drain", "--all").returncode == 0


def _end(at: Stage) -> None:
    os.kill(at.pool.pid, signal.SIGKILL)


#: What is done, by whom it is told.
_FAULTS: Final[Sequence[tuple[str, Callable[[Stage], None], str]]] = (
    ("the model takes 0.2 s longer", _slow, "GpupoolLatencyHigh"),
    ("a worker is frozen", freeze, "GpupoolWorkerLate"),
    ("the model raises for one request in nine", _fail, "GpupoolErrorRateHigh"),
    ("a client asks for a model that is not there", _mistake, "GpupoolClientMistakes"),
    ("samples do not fit into memory", _exhaust, "GpupoolOutOfMemory"),
    ("a card is used to 5 % although there is work", _idle, "GpupoolGpuIdle"),
    ("a flood, 800 requests/s of 0.5 s", _flood, "GpupoolQueueLong"),
    ("the same: its refusals", _flood, "GpupoolOverloaded"),
    ("a request kills its workers", _poison, "GpupoolPoison"),
    ("a worker crashes three times", _crash, "GpupoolWorkerRestarting"),
    ("it crashes on", _crash_on, "GpupoolWorkerParked"),
    ("the router is killed", _kill_router, "GpupoolRouterDied"),
    ("a bad configuration is deployed", spoil_configuration, "GpupoolReloadRefused"),
    ("a card reports XID 63", _xid, "GpupoolXid"),
    ("a card is hot", heat, "GpupoolCardThrottled"),
    ("a card's memory is full", _fill, "GpupoolDeviceMemoryHigh"),
    ("a card has a double-bit error", _judge, "GpupoolCardQuarantined"),
    ("a card falls off the bus", lose, "GpupoolCardLost"),
    ("NVML hangs", _hang, "GpupoolCardUnknown"),
    ("somebody drains all workers", _drain, "GpupoolNotReady"),
    ("the supervisor is killed", _end, "GpupoolTargetDown"),
)


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Do the first faults that there is time for, at some 4 s each; all of them in full."""
    (folder / "prometheus").mkdir()
    at = staged(folder, "Trouble", config=_CONFIG)
    with RunningPrometheus(folder / "prometheus", f"127.0.0.1:{at.pool.http}") as prometheus, at.pool:
        at.pool.start()
        prometheus.wait_until_up()
        return list(_do(at, prometheus, _FAULTS[: max(1, int(seconds / 4))]))


def staged(folder: Path, model: str, *, options: str = "", config: str) -> Stage:
    """A pool, not started, of a worker for each of four pretended cards, without torch."""
    (folder / "pool").mkdir()
    cards = FakeCards(folder)
    pool = RunningPool(folder / "pool", model, options=options, config=config)
    pool.env |= cards.environment()
    pool.env["PYTHONPATH"] = f"{_SUPPORT / 'no_torch'}:{pool.env['PYTHONPATH']}"
    pool.file.write_text(pool.file.read_text().replace('devices = "cpu:2"', 'devices = "auto"'))
    return Stage(pool, cards)


def _do(
    at: Stage, prometheus: RunningPrometheus, faults: Sequence[tuple[str, Callable[[Stage], None], str]]
) -> Iterator[Finding]:
    load = Load(at.pool, rate=40)
    load.wait_for(320)  # a usual p99 to compare with
    yield equal("alerts before any fault", sorted(prometheus.all_firing()), [])
    for what, do, alert in faults:
        _wait(prometheus, alert, firing=False)
        before = prometheus.all_firing()
        if do is _kill_router:
            load.stop()  # a client this simple does not send again what a router took with it
        began = time.monotonic()
        do(at)
        _wait(prometheus, alert, firing=True)
        took = time.monotonic() - began
        beside = prometheus.all_firing() - before - {alert}
        yield told(f"{what}: {alert}", f"after {took:.1f} s" + (f"; also {', '.join(sorted(beside))}" if beside else ""))
        at.after.close()


def _wait(prometheus: RunningPrometheus, alert: str, *, firing: bool) -> None:
    for _ in until(_PATIENCE_S, every=0.1):
        if bool(prometheus.firing(alert)) == firing:
            return
    raise AssertionError(f"{alert} did not {'fire' if firing else 'end'} within {_PATIENCE_S} s")
