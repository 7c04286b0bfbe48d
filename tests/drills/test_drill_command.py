"""`gpupool drill` on a real pool under load."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drills.matrix import CONFIG
from support.running import Load, RunningPool

pytestmark = pytest.mark.processes
#: What the exit report may say. A frozen worker was in a batch, or it was idle.
CAUSES = {
    "oom": ("drilled: SIGKILL, as the kernel's OOM killer sends it",),
    "hang": ("no progress in batch past its deadline",),
    "freeze": ("no progress in batch past its deadline", "idle without a beat"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPool]:
    """One pool for all drills."""
    with RunningPool(Path(tmp_path_factory.mktemp("drill")), "Sleep", options="seconds = 0.01", config=CONFIG) as pool:
        yield pool.start()


def drill(pool: RunningPool, *arguments: str) -> dict[str, Any]:
    done = pool.cli("drill", *arguments, "--yes", "--json", "--timeout", "40", timeout=60.0)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("kind", ["oom", "freeze"])
def test_a_drill_under_load_fails_no_request_and_the_pool_comes_back(pool: RunningPool, kind: str) -> None:
    load = Load(pool, rate=60)
    load.wait_for(20)

    report = drill(pool, kind, "0")

    assert set(load.stop()) == {"ok"}
    assert report["back"]
    assert report["failed"] == {}
    assert set(report["replied"]) == {"ok"}
    assert report["last_exit"]["cause"].startswith(CAUSES[kind])
    steps = report["steps_s"]
    assert report["detected_s"] <= steps["exited"] <= steps["spawned"] <= steps["ready"] <= steps["full"]
    assert pool.records("drill_ended")[-1]["steps_s"] == steps


def test_a_drilled_hang_of_an_idle_worker_is_ended_at_the_batch_limit_with_its_stacks_in_the_log(pool: RunningPool) -> None:
    report = drill(pool, "hang", "1")

    assert report["last_exit"]["cause"].startswith(CAUSES["hang"])
    assert report["redispatched"] == 0
    assert any("drill.py" in r["line"] and r["worker"] == 1 for r in pool.records("output"))


def test_one_drill_at_a_time_and_the_last_ready_worker_only_by_force(pool: RunningPool) -> None:
    first = threading.Thread(target=drill, args=(pool, "kill", "0"))
    first.start()
    pool.wait(lambda s: s["workers"][0]["state"] != "ready")

    assert "another drill" in pool.ask("drill", worker="1", kind="kill")["error"]["message"]

    first.join()
    assert pool.cli("drain", "1").returncode == 0
    assert "only one" in pool.ask("drill", worker="0", kind="kill")["error"]["message"]
    assert "only a ready worker" in pool.ask("drill", worker="1", kind="kill")["error"]["message"]
    assert pool.ask("drill", worker="0", kind="melt")["error"]["code"] == "bad_request"
    assert pool.ask("drill", worker="0", kind="kill", within_s="soon")["error"]["code"] == "bad_request"
    assert pool.cli("resume", "1").returncode == 0
    pool.wait(lambda s: s["pool"]["workers_ready"] == 2)
