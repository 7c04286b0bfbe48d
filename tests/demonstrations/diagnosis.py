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
from typing import Final, TypeVar

from demonstrations.alarms import Stage, freeze, heat, lose, spoil_configuration, staged
from demonstrations.finding import Finding, equal
from support.forward_receiver import ForwardReceiver
from support.panels import queries
from support.prometheus import RunningPrometheus
from support.running import Load, RunningPool, until
from support.slowing_model import slow_file

_T = TypeVar("_T")
#: For an alert to fire or to end, and for what is shown; a card's work is limited after 30 s of heat.
_PATIENCE_S: Final = 60.0
_EACH_S: Final = 12.0
_USUAL_PER_S: Final = 30.0
_LIMIT: Final = 8  # samples in a batch
_BUCKETS: Final = 16
#: What one sample takes by itself. A worker does 25 a second so, and 44 in full batches.
_ALONE_S: Final = 0.04

#: The first lines belong to the model's table.
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
    """Both pools, what watches them, where the first sends its log, and the load that the present fault brought, with the code it is to get."""

    cards: Stage
    cpu: Stage
    prometheus: RunningPrometheus
    receiver: ForwardReceiver
    load: tuple[Load, str] | None = None


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard, and which of its series must come to lie where to show the fault."""

    title: str
    labels: Mapping[str, str] = field(default_factory=dict)
    least: float = float("-inf")
    most: float = float("inf")
    legend: str = ""  # of one query, where a panel has several

    def __str__(self) -> str:
        """The bound, in words."""
        words = [self.legend, *(f"{key} {value}" for key, value in self.labels.items())]
        words += [f"at least {self.least:g}"] if self.least > float("-inf") else []
        words += [f"at most {self.most:g}"] if self.most < float("inf") else []
        return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Look:
    """A command, and what must stand in one line of its output: a regular expression."""

    command: str
    shows: str


@dataclass(frozen=True)
class Drill:
    """One fault. In its texts {device} is the card of `slot`, {file} the configuration, {fluentd} an address, {request} one of the load's ids."""

    fault: str
    do: Callable[[Scene], None]
    alert: str
    labels: Mapping[str, str]
    panel: Panel
    looks: Sequence[Look]
    slot: int = 0
    on_cpu: bool = False


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Do the first faults that there is time for, at some 12 s each; all of them in full."""
    for part in ("cards", "cpu", "prometheus"):
        (folder / part).mkdir()
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(ForwardReceiver())
        config = _ON_CARDS.format(limit=_LIMIT, buckets=list(range(1, _BUCKETS + 1)), fluentd=receiver.address)
        options = f"fixed_s = {_ALONE_S / 2}, each_s = {_ALONE_S / 2}"
        cards = staged(folder / "cards", "slowing_model:Slowing", options=options, config=config)
        config = _ON_CPU.format(kept=200_000, leak=_LEAK_BYTES_PER_HOUR, budget=512 * _MIB)
        options = f"bytes_per_unit = {_MIB}, warm = []"
        pool = RunningPool(folder / "cpu", "hungry_model:Hungry", workers=1, options=options, config=config)
        scene = Scene(cards, Stage(pool, cards.cards), _watch(stack, folder / "prometheus", cards.pool, pool), receiver)
        stack.callback(scene.cpu.after.close)
        stack.callback(cards.after.close)
        stack.callback(Load(cards.pool, rate=_USUAL_PER_S).stop)
        _soon(lambda: scene.prometheus.query("instance_worker:gpupool_sample_seconds:baseline > 0"))  # what is usual
        findings = [equal("alerts before any fault", sorted(scene.prometheus.all_firing()), [])]
        for drill in DRILLS[: max(1, int(seconds / _EACH_S))]:
            findings += _drill(scene, drill)
        return findings


def _watch(stack: contextlib.ExitStack, folder: Path, *pools: RunningPool) -> RunningPrometheus:
    prometheus = stack.enter_context(RunningPrometheus(folder, *(_instance(pool) for pool in pools)))
    for pool in pools:
        stack.enter_context(pool).start()
    prometheus.wait_until_up()
    return prometheus


def _instance(pool: RunningPool) -> str:
    return f"127.0.0.1:{pool.http}"


def _drill(scene: Scene, drill: Drill) -> Iterator[Finding]:
    at = scene.cpu if drill.on_cpu else scene.cards
    known = {
        "file": str(at.pool.file),
        "fluentd": scene.receiver.address,
        "device": "" if drill.on_cpu else at.uuid(drill.slot),
    }
    quiet = _soon(lambda: not scene.prometheus.firing(drill.alert))
    began, scene.load = time.monotonic(), None
    drill.do(scene)

    labels = _filled_in(drill.labels, known)
    wanted = {"instance": _instance(at.pool), **labels}.items()
    fired = _soon(lambda: any(wanted <= alert["labels"].items() for alert in scene.prometheus.firing(drill.alert)))
    took = time.monotonic() - began
    beside = sorted(scene.prometheus.all_firing() - {drill.alert})
    told = f"after {took:.1f} s" + (f"; also {', '.join(beside)}" if beside else "")
    named = ", ".join(f"{key} {value}" for key, value in labels.items())
    bound = f"fires{f' for {named}' if named else ''}"
    yield Finding(f"{drill.fault}: {drill.alert}", told if fired else "did not fire", bound, bool(quiet and fired))

    seen = _soon(lambda: _on_panel(scene.prometheus, _instance(at.pool), drill.panel, known))
    yield Finding(
        f"{drill.fault}: *{drill.panel.title}*", seen or "does not show it", str(drill.panel).format_map(known), bool(seen)
    )

    if scene.load:
        known["request"] = _answered(*scene.load)
    for look in drill.looks:
        command, shows = look.command.format_map(known), look.shows.format_map(known)
        line = _soon(lambda command=command, shows=shows: _line(at.pool, command, shows))  # type: ignore[misc]
        yield Finding(f"{drill.fault}: `gpupool {command}`", line or "does not say it", f"`{shows}`", bool(line))
    at.after.close()


def _soon(look: Callable[[], _T]) -> _T:
    """What a look gives as soon as it is something, or at last."""
    seen = look()
    for _ in until(_PATIENCE_S, every=0.2):
        if seen:
            break
        seen = look()
    return seen


def _filled_in(labels: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    return {key: value.format_map(known) for key, value in labels.items()}


def _on_panel(prometheus: RunningPrometheus, instance: str, panel: Panel, known: Mapping[str, str]) -> str:
    """The series that shows the fault, in words; empty when none does."""
    wanted = _filled_in(panel.labels, known).items()
    for name, expression in queries(instance).items():
        _, title, legend = name.split(" / ", 2)
        if title == panel.title and panel.legend in legend:
            for series in prometheus.query(expression):
                value, labels = float(series["value"][1]), series["metric"]
                if wanted <= labels.items() and panel.least <= value <= panel.most:
                    words = re.sub(r"{{(\w+)}}", lambda m, labels=labels: labels.get(m[1], ""), legend)  # type: ignore[misc]
                    return f"{words}: {value:.4g}"
    return ""


def _line(pool: RunningPool, command: str, shows: str) -> str:
    """The first line of a command's output that says it; empty when none does."""
    done = pool.cli(*command.split())
    return next((" ".join(line.split()) for line in (done.stdout + done.stderr).splitlines() if re.search(shows, line)), "")


def _answered(load: Load, code: str) -> str:
    """The id of the newest of its requests that was answered so."""
    found = _soon(lambda: [name for name, reply in list(load.replies.items()) if reply["code"] == code])
    assert found, f"no {code} within {_PATIENCE_S} s"
    return found[-1]


def _slow_down(scene: Scene) -> None:
    at = scene.cards
    file = slow_file(at.pool.toy_log, at.pool.worker(1)["pid"])
    at.after.callback(file.unlink)
    file.touch()


def _scatter(scene: Scene) -> None:
    """More than can be done, of all lengths in turn: of each bucket only few wait in a worker."""
    scene.load = scene.cards.load(250, lambda n: {"i": n, "length": 1 + n % _BUCKETS}), "ok"


def _flood(scene: Scene) -> None:
    scene.load = scene.cards.load(400), "overloaded"


def _swallow(scene: Scene) -> None:
    scene.cards.after.callback(setattr, scene.receiver, "mode", "ack")
    scene.receiver.mode = "hole"


def _leak(scene: Scene) -> None:
    scene.cpu.load(20, model="leaky")


def _exhaust(scene: Scene) -> None:
    scene.load = scene.cpu.load(5, {"length": 4096}), "out_of_memory"


#: In this order: a card keeps its lowered limit for two minutes after the heat, a lost one is lost, and a leak leaves less memory.
DRILLS: Final[Sequence[Drill]] = (
    Drill(
        "a worker's model becomes slow", _slow_down, "GpupoolModelSlow", {"worker": "1"},
        Panel("Time per sample", {"worker": "1"}, least=1.5 * _ALONE_S),
        [Look("profile 1", r"slowing_model\.py")],
    ),
    Drill(
        "a worker is frozen", lambda scene: freeze(scene.cards), "GpupoolWorkerLate", {"worker": "0"},
        Panel("Age of heartbeats", {"worker": "0"}, least=0.5),
        [Look("status", r"^0 .* {device} .*beat is missing"), Look("stacks 0", r"^worker 0, .*stopped")],
    ),
    Drill(
        "batches stay small", _scatter, "GpupoolBatchesSmall", {"worker": "0"},
        Panel("Samples in a batch, mean", {"worker": "0"}, most=_LIMIT / 2),
        [Look("explain {request}", r"worker \d \(GPU-.*in a batch of [1-4];")],
    ),
    Drill(
        "the queue is full", _flood, "GpupoolOverloaded", {"model": "toy"},
        Panel("Errors by code", {"code": "overloaded"}, least=1.0),
        [Look("status", r"^router: .*pending \d+.*overloaded \d+"), Look("explain {request}", r"overloaded.*waiting")],
    ),
    Drill(
        "the log's receiver takes nothing", _swallow, "GpupoolLogForwardDown", {},
        Panel("To Fluentd", most=0.0, legend="reached"),
        [Look("status", r"^log: Fluentd at {fluentd} takes nothing from .*router")],
    ),
    Drill(
        "a bad configuration is deployed", lambda scene: spoil_configuration(scene.cards), "GpupoolReloadRefused", {},
        Panel("Configuration", most=0.0, legend="last reload taken"),
        [Look("status", r"last reload refused: {file}: batching\.max_batsh")],
    ),
    Drill(
        "a card throttles", lambda scene: heat(scene.cards), "GpupoolCardThrottled", {"device": "{device}"},
        Panel("Clocks lowered by", {"device": "{device}"}, least=1.0),
        [Look("status", r"^0 .* {device} +degraded .*thermal")],
    ),
    Drill(
        "a card is lost", lambda scene: lose(scene.cards), "GpupoolCardLost", {"device": "{device}"},
        Panel("Health", {"device": "{device}", "health": "lost"}, least=1.0),
        [Look("status", r"^3 +lost .* {device} +lost .*XID 79")],
        slot=3,
    ),
    Drill(
        "a model leaks", _leak, "GpupoolMemoryLeak", {"worker": "0"},
        Panel("Rise in an hour of work", {"worker": "0", "kind": "host"}, least=_LEAK_BYTES_PER_HOUR),
        [Look("status", r"^0 .*memory rises: a leak"), Look("events --worker 0", r"worker 0 .*memory_leak_suspected")],
        on_cpu=True,
    ),
    Drill(
        "samples do not fit into memory", _exhaust, "GpupoolOutOfMemory", {"worker": "0"},
        Panel("Out of memory", {"worker": "0"}, least=0.1),
        [Look("status", r"^0 .*out of memory \d+ times"), Look("explain {request}", r"^ +out_of_memory ")],
        on_cpu=True,
    ),
)  # fmt: skip
