"""Ten faults, each found as somebody on call would: the alert that fires, the panel that shows it, the command that names who is at fault.

Two pools, one on pretended cards and one on a CPU with a memory limit, and a real Prometheus with the faster rules of
tests/support/prometheus.py: times say that something comes, not when it would in earnest. docs/runbook.md has the table.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from demonstrations.alarms import Stage, freeze, heat, lose, spoil_configuration, staged
from demonstrations.finding import Finding, equal
from support.forward_receiver import ForwardReceiver
from support.panels import queries
from support.prometheus import RunningPrometheus
from support.running import Load, RunningPool, until
from support.slowing_model import slow_file

_T = TypeVar("_T")
#: For an alert to fire or to end; a card's work is limited after 30 s of heat.
_PATIENCE_S: Final = 60.0
_USUAL_PER_S: Final = 30.0
_LIMIT: Final = 8  # samples in a batch
_BUCKETS: Final = 16

#: The first lines belong to the model's table. A worker does 25 samples a second one by one, and 44 in full batches.
_ON_CARDS: Final = """
max_batch = {limit}
max_queue = 24
length_buckets = {buckets}
[router]
max_pending = 200
[supervision]
heartbeat_interval_s = 0.1
heartbeat_timeout_s = 0.5
batch_timeout_s = 60.0
stop_timeout_s = 2.0
[logs]
fluentd = "{fluentd}"
"""
_MIB: Final = 1 << 20
_LEAK_BYTES_PER_HOUR: Final = 1 << 30
_ON_CPU: Final = """
[[model]]
name = "leaky"
handler = "leaky_model:Leaky"
options = {{ keep_bytes = {kept} }}
[supervision]
heartbeat_interval_s = 0.1
leak_window_s = 6.0
leak_alarm_bytes_per_hour = {leak}
[memory]
cpu_limit_bytes = {budget}
"""


@dataclass
class Scene:
    """Both pools, what watches them, and where the first sends its log."""

    cards: Stage
    cpu: Stage
    prometheus: RunningPrometheus
    receiver: ForwardReceiver
    request_id: str = ""  # of one that the present fault concerned


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard, and which of its series must come to lie where to show the fault."""

    title: str
    labels: Mapping[str, str] = field(default_factory=dict)
    least: float = float("-inf")
    most: float = float("inf")
    legend: str = ""  # of one query, where a panel has several


@dataclass(frozen=True)
class Look:
    """A command, and what must stand in one line of its output."""

    command: str
    shows: str  # a regular expression


@dataclass(frozen=True)
class Drill:
    """One fault. What is looked for may hang on what is known only once it has begun."""

    fault: str
    stage: Callable[[Scene], Stage]
    do: Callable[[Scene], None]
    alert: str
    labels: Callable[[Stage], Mapping[str, str]]
    panel: Callable[[Stage], Panel]
    looks: Callable[[Scene], Sequence[Look]]


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Do the first faults that there is time for, at some 12 s each; all of them in full."""
    for part in ("cards", "cpu", "prometheus"):
        (folder / part).mkdir()
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(ForwardReceiver())
        config = _ON_CARDS.format(limit=_LIMIT, buckets=list(range(1, _BUCKETS + 1)), fluentd=receiver.address)
        cards = staged(folder / "cards", "slowing_model:Slowing", options="fixed_s = 0.02, each_s = 0.02", config=config)
        config = _ON_CPU.format(kept=200_000, leak=_LEAK_BYTES_PER_HOUR, budget=512 * _MIB)
        hungry = f"bytes_per_unit = {_MIB}, warm = []"
        cpu = Stage(RunningPool(folder / "cpu", "hungry_model:Hungry", workers=1, options=hungry, config=config), cards.cards)
        targets = [f"127.0.0.1:{at.pool.http}" for at in (cards, cpu)]
        prometheus = stack.enter_context(RunningPrometheus(folder / "prometheus", *targets))
        for at in (cards, cpu):
            stack.enter_context(at.pool).start()
        prometheus.wait_until_up()
        stack.callback(cpu.after.close)
        stack.callback(cards.after.close)
        usual = Stage(cards.pool, cards.cards, stack)
        usual.load(_USUAL_PER_S)
        for _ in until(_PATIENCE_S, every=0.1):  # what is usual must be known
            if prometheus.query("instance_worker:gpupool_sample_seconds:baseline > 0"):
                break
        scene = Scene(cards, cpu, prometheus, receiver)
        findings = [equal("alerts before any fault", sorted(prometheus.all_firing()), [])]
        for drill in _DRILLS[: max(1, int(seconds / 12))]:
            findings += _drill(scene, drill)
        return findings


def _drill(scene: Scene, drill: Drill) -> Iterator[Finding]:
    at = drill.stage(scene)
    instance = f"127.0.0.1:{at.pool.http}"
    quiet = _soon(lambda: not scene.prometheus.firing(drill.alert))
    began = time.monotonic()
    drill.do(scene)
    labels = {"instance": instance, **drill.labels(at)}
    fired = _soon(lambda: any(labels.items() <= a["labels"].items() for a in scene.prometheus.firing(drill.alert)))
    took = time.monotonic() - began
    named = ", ".join(f"{key} {value}" for key, value in labels.items() if key != "instance")
    beside = sorted(scene.prometheus.all_firing() - {drill.alert})
    told = f"after {took:.1f} s" + (f"; also {', '.join(beside)}" if beside else "")
    what = f"{drill.fault}: {drill.alert}"
    yield Finding(what, told if fired else "did not fire", f"fires{f', names {named}' if named else ''}", bool(quiet and fired))
    panel = drill.panel(at)
    seen = _soon(lambda: _on_panel(scene.prometheus, instance, panel))
    yield Finding(f"{drill.fault}: panel *{panel.title}*", seen or "does not show it", _bound(panel), bool(seen))
    for look in drill.looks(scene):
        line = _soon(lambda look=look: _line(at.pool, look))  # type: ignore[misc]
        name = f"gpupool {look.command}"
        yield Finding(f"{drill.fault}: `{name}`", line or f"does not say it: {_output(at.pool, look)}", look.shows, bool(line))
    at.after.close()


def _soon(look: Callable[[], _T]) -> _T:
    """What a look gives as soon as it is something, or at last."""
    seen = look()
    for _ in until(_PATIENCE_S, every=0.2):
        if seen:
            break
        seen = look()
    return seen


def _on_panel(prometheus: RunningPrometheus, instance: str, panel: Panel) -> str:
    """The series that shows the fault, in words; empty when none does."""
    for name, expression in queries(instance).items():
        _, title, legend = name.split(" / ", 2)
        if title == panel.title and panel.legend in legend:
            for series in prometheus.query(expression):
                value, labels = float(series["value"][1]), series["metric"]
                if panel.labels.items() <= labels.items() and panel.least <= value <= panel.most:
                    return f"{_filled_in(legend, labels)}: {value:.4g}"
    return ""


def _filled_in(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda m: labels.get(m[1], ""), legend)


def _bound(panel: Panel) -> str:
    words = [f"{key} {value}" for key, value in panel.labels.items()]
    words += [f"at least {panel.least:g}"] if panel.least > float("-inf") else []
    words += [f"at most {panel.most:g}"] if panel.most < float("inf") else []
    return ", ".join(words)


def _output(pool: RunningPool, look: Look) -> str:
    done = pool.cli(*look.command.split())
    return done.stdout + done.stderr


def _line(pool: RunningPool, look: Look) -> str:
    return next((" ".join(line.split()) for line in _output(pool, look).splitlines() if re.search(look.shows, line)), "")


def _slow_down(scene: Scene) -> None:
    at = scene.cards
    file = slow_file(at.pool.toy_log, at.pool.worker(1)["pid"])
    at.after.callback(file.unlink)
    file.touch()


def _freeze(scene: Scene) -> None:
    freeze(scene.cards)


def _scatter(scene: Scene) -> None:
    """More than can be done, of all lengths in turn: of each bucket only few wait in a worker."""
    load = scene.cards.load(250, lambda n: {"i": n, "length": 1 + n % _BUCKETS})
    scene.request_id = _answered(load, "ok")


def _flood(scene: Scene) -> None:
    scene.request_id = _answered(scene.cards.load(400), "overloaded")


def _answered(load: Load, code: str) -> str:
    """The id of one of its requests that was answered so."""
    found = _soon(lambda: next((name for name, reply in list(load.replies.items()) if reply["code"] == code), ""))
    assert found, f"no {code} within {_PATIENCE_S} s"
    return found


def _swallow(scene: Scene) -> None:
    def answer() -> None:
        scene.receiver.mode = "ack"

    scene.cards.after.callback(answer)
    scene.receiver.mode = "hole"


def _spoil(scene: Scene) -> None:
    spoil_configuration(scene.cards)


def _heat(scene: Scene) -> None:
    heat(scene.cards)


def _lose(scene: Scene) -> None:
    lose(scene.cards)


def _leak(scene: Scene) -> None:
    scene.cpu.load(20, model="leaky")


def _exhaust(scene: Scene) -> None:
    scene.request_id = _answered(scene.cpu.load(5, {"length": 4096}), "out_of_memory")


def _of_cards(scene: Scene) -> Stage:
    return scene.cards


def _of_cpu(scene: Scene) -> Stage:
    return scene.cpu


#: In this order: a card keeps its lowered limit for two minutes after the heat, a lost one is lost, and a leak leaves less memory.
_DRILLS: Final[Sequence[Drill]] = (
    Drill(
        "a worker's model becomes slow", _of_cards, _slow_down, "GpupoolModelSlow", lambda _: {"worker": "1"},
        lambda _: Panel("Time per sample", {"worker": "1"}, least=0.08),
        lambda _: [Look("profile 1", r"slowing_model|sleep")],
    ),
    Drill(
        "a worker is frozen", _of_cards, _freeze, "GpupoolWorkerLate", lambda _: {"worker": "0"},
        lambda _: Panel("Age of heartbeats", {"worker": "0"}, least=0.5),
        lambda s: [Look("status", rf"^0 .*{s.cards.uuid(0)}.*beat is missing"), Look("stacks 0", r"^worker 0, pid \d+, .*stopped")],
    ),
    Drill(
        "batches stay small", _of_cards, _scatter, "GpupoolBatchesSmall", lambda _: {"worker": "0"},
        lambda _: Panel("Samples in a batch, mean", {"worker": "0"}, most=_LIMIT / 2),
        lambda s: [Look(f"explain {s.request_id}", r"worker \d \(GPU-.*in a batch of [1-4];")],
    ),
    Drill(
        "the queue is full", _of_cards, _flood, "GpupoolOverloaded", lambda _: {"model": "toy"},
        lambda _: Panel("Errors by code", {"code": "overloaded"}, least=1.0),
        lambda s: [Look("status", r"pending \d+.*overloaded \d+"), Look(f"explain {s.request_id}", r"overloaded")],
    ),
    Drill(
        "the log's receiver takes nothing", _of_cards, _swallow, "GpupoolLogForwardDown", lambda _: {},
        lambda _: Panel("To Fluentd", most=0.0, legend="reached"),
        lambda s: [Look("status", rf"^log: Fluentd at {s.receiver.address} takes nothing from .*router")],
    ),
    Drill(
        "a bad configuration is deployed", _of_cards, _spoil, "GpupoolReloadRefused", lambda _: {},
        lambda _: Panel("Configuration", most=0.0, legend="last reload taken"),
        lambda s: [Look("status", rf"last reload refused: .*{s.cards.pool.file}.*max_batsh")],
    ),
    Drill(
        "a card throttles", _of_cards, _heat, "GpupoolCardThrottled", lambda at: {"device": at.uuid(0)},
        lambda at: Panel("Clocks lowered by", {"device": at.uuid(0)}, least=1.0),
        lambda s: [Look("status", rf"^0 .*{s.cards.uuid(0)} +degraded.*thermal")],
    ),
    Drill(
        "a card is lost", _of_cards, _lose, "GpupoolCardLost", lambda at: {"device": at.uuid(3)},
        lambda _: Panel("Health", {"health": "lost"}, least=1.0),
        lambda s: [Look("status", rf"^3 +lost .*{s.cards.uuid(3)} +lost.*XID 79")],
    ),
    Drill(
        "a model leaks", _of_cpu, _leak, "GpupoolMemoryLeak", lambda _: {"worker": "0"},
        lambda _: Panel("Rise in an hour of work", {"worker": "0", "kind": "host"}, least=_LEAK_BYTES_PER_HOUR),
        lambda _: [Look("events --worker 0", "worker 0 .*memory_leak_suspected"), Look("status", r"^0 .*memory rises: a leak")],
    ),
    Drill(
        "samples do not fit into memory", _of_cpu, _exhaust, "GpupoolOutOfMemory", lambda _: {"worker": "0"},
        lambda _: Panel("Out of memory", {"worker": "0"}, least=0.1),
        lambda s: [Look("status", r"^0 .*cpu:0 .*out of memory \d+ times"), Look(f"explain {s.request_id}", r"out_of_memory")],
    ),
)  # fmt: skip
