"""A real Prometheus scrapes a real pool: every panel has data, every rule reads what there is, and a frozen worker raises its alert."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.fake_cards import UUIDS, FakeCards
from support.panels import ALL_RULES, queries, selectors
from support.prometheus import RunningPrometheus
from support.running import Load, RunningPool, until

pytestmark = pytest.mark.processes
SUPPORT = Path(__file__).parents[1] / "support"

#: What a healthy pool on pretended cards, without torch and without Fluentd, cannot tell, and why.
SILENT = {
    "gpupool_memory_pool_bytes": "needs torch on a card",
    "gpupool_memory_pool_used_bytes": "needs torch on a card",
    "gpupool_memory_reserved_bytes": "needs torch on a card",
    "gpupool_log_forwarded_total": "Fluentd is not set up",
    "gpupool_log_forward_dropped_total": "Fluentd is not set up",
    "gpupool_log_forward_up": "Fluentd is not set up",
}

CONFIG = """
[supervision]
heartbeat_interval_s = 0.1
heartbeat_timeout_s = 0.5
batch_timeout_s = 30.0
stop_timeout_s = 2.0
leak_window_s = 3.6
[memory]
cpu_limit_bytes = 1073741824
"""


class Scene(NamedTuple):
    """The pool after all that was done to it, and Prometheus, which saw it."""

    prometheus: RunningPrometheus
    fired: list[dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two cards and a worker for overflow under mixed load; one worker is frozen, and then killed; a card is hot and has an XID."""
    folder = tmp_path_factory.mktemp("scene")
    for part in ("pool", "prometheus"):
        (folder / part).mkdir()
    cards = FakeCards(folder, UUIDS[:2])
    cards.say(f"gpu {UUIDS[0]} throttle=0x40")
    with contextlib.ExitStack() as stack:
        pool = RunningPool(folder / "pool", "Sleep", options="seconds = 0.02", config=CONFIG)
        pool.env |= cards.environment()
        pool.env["PYTHONPATH"] = f"{SUPPORT / 'no_torch'}:{pool.env['PYTHONPATH']}"
        pool.file.write_text(pool.file.read_text().replace('devices = "cpu:2"', 'devices = "auto"\ncpu_overflow = 1'))
        prometheus = stack.enter_context(RunningPrometheus(folder / "prometheus", f"127.0.0.1:{pool.http}"))
        stack.enter_context(pool)
        pool.start()
        prometheus.wait_until_up()
        loads = [Load(pool, rate=60), Load(pool, rate=5, model="nobody"), Load(pool, rate=5, timeout_ms=1)]
        stack.callback(lambda: [load.stop() for load in loads])
        loads[0].wait_for(30)
        cards.say(f"event {UUIDS[0]} xid 63")
        pid = pool.worker(1)["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            fired = wait_for_alert(prometheus, "GpupoolWorkerLate")
        finally:
            os.kill(pid, signal.SIGKILL)
        pool.wait_for_incarnation(1, 2)
        yield Scene(prometheus, fired)


def wait_for_alert(prometheus: RunningPrometheus, name: str) -> list[dict[str, dict[str, str]]]:
    """Wait until an alert fires."""
    for _ in until(20.0, every=0.1):
        if fired := prometheus.firing(name):
            return fired
    raise AssertionError(f"{name} did not fire; there is {prometheus.query('gpupool_worker_late')}")


def missing(prometheus: RunningPrometheus, expressions: dict[str, str]) -> dict[str, str]:
    """Those that have no data, after a while in which all may get some."""
    left = expressions
    for _ in until(20.0, every=0.2):
        left = {name: text for name, text in left.items() if not prometheus.query(text)}
        if not left:
            break
    return left


def silent(expression: str) -> bool:
    """Whether an expression reads something that this pool cannot tell."""
    return any(metric in SILENT for metric, _ in selectors(expression))


def test_a_frozen_worker_raises_its_alert(scene: Scene) -> None:
    (alert,) = scene.fired
    assert alert["labels"]["worker"] == "1"
    instance = scene.prometheus.target
    assert alert["annotations"]["summary"] == f"{instance}: worker 1 gives no sign of life and gets no work"


def test_every_panel_has_data(scene: Scene) -> None:
    assert missing(scene.prometheus, {name: text for name, text in queries().items() if not silent(text)}) == {}


def test_every_metric_and_label_that_a_rule_reads_is_there(scene: Scene) -> None:
    """An alert of a metric that does not exist, or has other labels, is for ever quiet."""
    wanted: dict[str, str] = {}
    for rule in ALL_RULES:
        for metric, labels in selectors(rule["expr"]):
            if metric not in SILENT:
                present = ",".join(f"{label}!=''" for label in labels)
                wanted[f"{rule.get('alert', rule.get('record'))}: {metric}"] = f"{metric}{{{present}}}"
    assert missing(scene.prometheus, wanted) == {}


def test_every_recording_rule_gives_something(scene: Scene) -> None:
    records = {rule["record"]: rule["record"] for rule in ALL_RULES if "record" in rule}
    assert missing(scene.prometheus, {n: text for n, text in records.items() if n not in SILENT}) == {}


def test_what_is_excused_is_really_silent(scene: Scene) -> None:
    """The list of excuses may not outlive its reasons."""
    assert {metric for metric in SILENT if scene.prometheus.query(metric)} == set()
