"""Operators act on a pool under load; nobody loses a request."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from support.running import FAST, GPUPOOL, Load, RunningPool

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]


def test_restart_drain_resume_and_stop_under_load_lose_nothing(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", options="seconds = 0.02").start()
    load = Load(pool, rate=100)
    load.wait_for(50)
    assert pool.cli("restart-worker", "0").returncode == 0
    assert pool.worker(0)["incarnation"] == 2
    assert pool.cli("drain", "1").returncode == 0
    assert pool.worker(1)["state"] == "drained"
    assert pool.worker(1)["pid"]
    assert pool.cli("status").returncode == 6
    before = len([n for n in pool.notes() if n["pid"] == pool.worker(1)["pid"]])
    load.wait_for(50)
    assert len([n for n in pool.notes() if n["pid"] == pool.worker(1)["pid"]]) == before
    assert pool.cli("resume", "1").returncode == 0
    load.wait_for(20)
    assert set(load.stop()) == {"ok"}


def test_sigterm_finishes_what_is_accepted_refuses_what_comes_later_and_exits_zero(make_pool: MakePool) -> None:
    pool = make_pool("Sleep").start()
    with pool.client() as client, pool.client() as late:
        late.call({})
        for n in range(50):
            client.send({"i": n, "sleep": 1.0})
        pool.wait(lambda s: s["router"]["accepted_total"] == 51)
        assert pool.process
        pool.process.send_signal(signal.SIGTERM)
        pool.wait(lambda s: s["pool"]["state"] == "draining", within=3.0)
        header, _ = late.call({}, within=1.0)
        assert header["code"] == "draining"
        assert {h["code"] for h, _ in client.collect(50).values()} == {"ok"}
    assert pool.process.wait(20) == 0
    assert pool.records()[-1]["event"] == "pool_stopped"
    assert not pool.pids()


def test_a_stuck_request_is_answered_at_the_drain_limit_and_the_pool_ends(make_pool: MakePool) -> None:
    config = FAST.replace("batch_timeout_s = 3.0", "batch_timeout_s = 100.0")
    pool = make_pool("Trouble", config=config)
    pool.head = pool.head.replace("[pool]", "[pool]\ndrain_timeout_s = 2.0")
    pool.file.write_text(pool.file.read_text().replace("[pool]", "[pool]\ndrain_timeout_s = 2.0"))
    pool.start()
    with pool.client() as client:
        client.send({"do": "hang"})
        pool.wait(lambda s: any(w["running"] for w in s["workers"]))
        began = time.monotonic()
        assert pool.process
        pool.process.terminate()
        reply = client.receive(10.0)
        assert reply is not None
        assert reply[0]["code"] == "draining"
    assert pool.process.wait(10) == 0
    assert time.monotonic() - began < 6.0


def test_a_preprocess_that_outlasts_the_drain_limit_is_finished_and_runs_no_second_time(make_pool: MakePool) -> None:
    config = FAST.replace("stop_timeout_s = 2.0", "stop_timeout_s = 60.0").replace(
        "batch_timeout_s = 3.0", "batch_timeout_s = 100.0"
    )
    pool = make_pool("Gated", config=config)
    pool.file.write_text(pool.file.read_text().replace("[pool]", "[pool]\ndrain_timeout_s = 0.2"))
    pool.start()
    gate = pool.folder / "gate"
    with pool.client() as client:
        client.send({"i": 1, "gate": str(gate)}, retry=False)
        pool.wait(lambda _: pool.notes("preprocess"))
        pid = pool.notes("preprocess")[0]["pid"]
        slot = next(w["worker"] for w in pool.status()["workers"] if w["pid"] == pid)
        assert pool.cli("restart-worker", str(slot), "--no-wait").returncode == 0
        pool.wait(lambda _: pool.records("worker_leaving"))
        gate.touch()
        ((header, _),) = client.collect(1).values()
        assert (header["code"], header["attempts"]) == ("ok", 1)
        pool.wait_for_incarnation(slot, 2)
    assert [n["pid"] for n in pool.notes("preprocess") + pool.notes()] == [pid, pid]


def test_a_worker_killed_while_it_drains_is_not_revived_until_resumed(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", config=FAST).start()
    with pool.client() as client:
        client.send({"sleep": 2.5})
        busy = next(w for w in pool.wait(lambda s: any(w["running"] for w in s["workers"]))["workers"] if w["running"])
        assert pool.cli("drain", str(busy["worker"]), "--no-wait").returncode == 0
        import os

        os.kill(busy["pid"], signal.SIGKILL)
        pool.wait(lambda s: s["workers"][busy["worker"]]["state"] == "stopped")
        assert client.collect(1)["1"][0]["code"] == "ok"
        assert pool.worker(busy["worker"])["state"] == "stopped"
    assert pool.cli("resume", busy["device"]["id"]).returncode == 0
    pool.wait(lambda s: s["pool"]["workers_ready"] == 2)


def test_drain_all_refuses_with_draining_and_resume_all_serves_again(make_pool: MakePool) -> None:
    pool = make_pool().start()
    assert pool.cli("drain", "--all").returncode == 0
    with pool.client() as client:
        assert client.call({})[0]["code"] == "draining"
        assert pool.cli("resume", "--all").returncode == 0
        assert client.call({})[0]["code"] == "ok"


def test_forced_restart_does_not_wait_and_blames_nobody(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", workers=1, config=FAST).start()
    with pool.client() as client:
        client.send({"sleep": 2.0})
        pool.wait(lambda s: s["workers"][0]["running"] == 1)
        assert pool.cli("restart-worker", "0", "--force").returncode == 0
        assert client.collect(1)["1"][0]["code"] == "ok"


def test_unknown_workers_are_named_and_refused(make_pool: MakePool) -> None:
    pool = make_pool().start()
    done = pool.cli("restart-worker", "9")
    assert done.returncode == 1
    assert "'9'" in done.stderr


def test_a_bad_reload_changes_nothing_and_a_good_one_changes_behaviour(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", workers=1, options="seconds = 0.05", config="[batching]\nmax_batch = 8\nmin_batch = 1\n").start()
    good = pool.file.read_text()
    pool.file.write_text(good.replace("max_batch = 8", "max_batchh = 8"))
    done = pool.cli("reload")
    assert done.returncode == 1
    assert "max_batchh" in done.stderr
    status = pool.status()
    assert status["pool"]["config_generation"] == 1
    assert "max_batchh" in status["pool"]["last_reload_error"]
    assert status["pool"]["ready"]

    pool.file.write_text(good.replace("max_batch = 8", "max_batch = 2") + '\n[logs]\nlevel = "debug"\n')
    done = pool.cli("reload")
    assert done.returncode == 0
    assert "batching.max_batch" in done.stdout
    pool.wait(lambda s: s["pool"]["config_generation"] == 2 and s["workers"][0]["batch_limit"] == 2)
    before = len(pool.notes())
    with pool.client() as client:
        for n in range(20):
            client.send({"i": n})
        client.collect(20)
    assert max(n["n"] for n in pool.notes()[before:]) == 2

    pool.file.write_text(good.replace('devices = "cpu:1"', 'devices = "cpu:2"'))
    done = pool.cli("reload")
    assert "pool.devices" in done.stdout


def test_sighup_reloads(make_pool: MakePool) -> None:
    pool = make_pool(config="[batching]\nmax_batch = 8\n").start()
    pool.file.write_text(pool.file.read_text().replace("max_batch = 8", "max_batch = 16"))
    assert pool.process
    for _ in range(5):
        pool.process.send_signal(signal.SIGHUP)
    pool.wait(lambda s: s["pool"]["config_generation"] >= 2 and s["workers"][0]["batch_limit"] == 16)


def test_a_second_instance_is_refused_and_does_not_harm_the_first(make_pool: MakePool) -> None:
    pool = make_pool().start()
    done = subprocess.run([*GPUPOOL, "serve", "-c", str(pool.file)], env=pool.env, capture_output=True, timeout=30, check=False)
    assert done.returncode == 75
    with pool.client() as client:
        assert client.call({})[0]["code"] == "ok"
    assert pool.cli("status").returncode == 0


def test_no_pool_is_unreachable(make_pool: MakePool) -> None:
    assert make_pool().cli("status").returncode == 3


def test_a_taken_address_is_told_and_ends_the_start(make_pool: MakePool) -> None:
    first = make_pool().start()
    for address in ("port", "http"):
        second = make_pool()
        mine, taken = getattr(second, address), getattr(first, address)
        second.file.write_text(second.file.read_text().replace(str(mine), str(taken)))
        second.start(ready=False)
        assert second.process
        assert second.process.wait(20) == 1
        assert str(taken) in second.records("cannot_start")[-1]["error"]
        assert not second.records("worker_spawned")


def test_systemd_hears_ready_status_and_stopping(make_pool: MakePool, tmp_path: object) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{tmp_path}/notify")
        manager.settimeout(10)
        pool = make_pool(env={"NOTIFY_SOCKET": f"{tmp_path}/notify"}).start()
        assert pool.process
        pool.process.terminate()
        assert pool.process.wait(20) == 0
        heard = []
        manager.setblocking(False)
        try:
            while True:
                heard.append(manager.recv(4096).decode())
        except BlockingIOError:
            pass
    assert "READY=1" in heard
    assert any(m.startswith("STATUS=ready: 2/2 workers ready") for m in heard)
    assert "STOPPING=1" in heard
    assert heard.index("READY=1") < heard.index("STOPPING=1")
