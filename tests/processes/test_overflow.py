"""Extra CPU workers beside (pretended) cards: told apart, supervised and steered; and workers that are renewed by themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.fake_cards import UUIDS, FakeCards
from support.running import FAST, Load, RunningPool

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]


def host(make_pool: MakePool, tmp_path: Path, model: str) -> RunningPool:
    """Four cards, and one CPU worker for overflow."""
    pool = make_pool(model, config=FAST)
    pool.env |= FakeCards(tmp_path).environment()
    pool.env["PYTHONPATH"] = f"{Path(__file__).parents[1] / 'support/no_torch'}:{pool.env['PYTHONPATH']}"
    pool.file.write_text(pool.file.read_text().replace('devices = "cpu:2"', 'devices = "auto"\ncpu_overflow = 1'))
    return pool


def test_an_overflow_worker_beside_cards_is_pinned_to_none_and_steered_by_its_name(make_pool: MakePool, tmp_path: Path) -> None:
    pool = host(make_pool, tmp_path, "Echo").start()
    status = pool.wait(lambda s: s["pool"]["overflow_ready"] == 1)

    assert (status["pool"]["workers_configured"], status["pool"]["overflow_configured"]) == (4, 1)
    assert [w["overflow"] for w in status["workers"]] == [False] * 4 + [True]
    assert status["workers"][4]["device"]["id"] == "cpu-overflow:0"
    assert {n["visible"] for n in pool.notes("load")} == {*UUIDS, ""}
    assert pool.cli("drain", "cpu-overflow:0").returncode == 0
    assert pool.cli("status").returncode == 0
    assert pool.cli("resume", "cpu-overflow:0").returncode == 0
    os.kill(pool.worker(4)["pid"], signal.SIGKILL)
    status = pool.wait(lambda s: s["workers"][4]["incarnation"] == 2 and s["workers"][4]["state"] == "ready")
    assert not pool.records("limits_set")


def test_a_model_that_needs_a_card_parks_the_overflow_worker_and_harms_nothing_else(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = host(make_pool, tmp_path, "CardOnly")
    pool.file.write_text(pool.file.read_text().replace("restart_delays_s = [0.0, 0.5, 1.0]", "max_restarts = 1"))
    pool.start()

    status = pool.wait(lambda s: s["workers"][4]["state"] == "parked")

    assert status["pool"]["ready"]
    assert not status["pool"]["degraded"]
    assert status["pool"]["batch_factor"] == 1.0
    assert "needs a card" in str(pool.records("worker_cannot_start", least=1))
    with pool.client() as client:
        assert client.call({"i": 1})[0]["code"] == "ok"


def test_workers_that_reach_their_limit_together_are_renewed_one_by_one_and_lose_nothing(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", options="seconds = 0.01", config=FAST + "recycle_after_batches = 30\n").start()
    load = Load(pool, rate=100)

    pool.wait(lambda s: all(w["incarnation"] > 1 and w["state"] == "ready" for w in s["workers"]), within=60.0)

    assert set(load.stop()) == {"ok"}
    assert not pool.records("worker_exited")
    begun = [r for r in pool.records() if r["event"] in ("worker_recycled", "worker_ready")][2:]
    assert [r["event"] for r in begun][:4] == ["worker_recycled", "worker_ready"] * 2
