"""Workers, router and supervisor die: what callers see, and what is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from support.running import FAST, Load, RunningPool, alive, until

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]


@pytest.mark.parametrize(
    "death",
    [{"do": "kill", "signal": "SIGKILL"}, {"do": "kill", "signal": "SIGSEGV"}, {"do": "kill", "signal": "SIGABRT"}, {"do": "exit", "code": 0}, {"do": "exit", "code": 1}],
    ids=["SIGKILL", "SIGSEGV", "SIGABRT", "exit 0", "exit 1"],
)  # fmt: skip
def test_a_death_costs_its_own_request_and_no_other(make_pool: MakePool, death: dict[str, object]) -> None:
    pool = make_pool("Trouble", config=FAST).start()
    load = Load(pool, rate=60, sample={"do": "sleep", "s": 0.02})
    load.wait_for(30)
    with pool.client() as client:
        began = time.monotonic()
        header, _ = client.call(death, retry=False)
        assert header["code"] in ("worker_lost", "poison")
        assert time.monotonic() - began < 3.0
    pool.wait(lambda s: sum(w["restarts"] for w in s["workers"]) == 1 and s["pool"]["workers_ready"] == 2)
    load.wait_for(30)
    assert set(load.stop()) == {"ok"}


def test_kill_nine_of_a_worker_is_seen_at_once_and_every_request_is_answered_ok(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", options="seconds = 0.02", config=FAST).start()
    load = Load(pool, rate=150)
    load.wait_for(100)
    old = pool.worker(0)["pid"]
    os.kill(old, signal.SIGKILL)
    pool.wait(lambda s: s["workers"][0]["pid"] not in (None, old), within=2.0)
    pool.wait(lambda s: s["pool"]["workers_ready"] == 2)
    load.wait_for(100)
    assert set(load.stop()) == {"ok"}
    last = pool.worker(0)["last_exit"]
    assert (last["signal"], last["code"]) == ("SIGKILL", None)
    assert pool.worker(1)["restarts"] == 0


def test_what_kills_twice_is_poison_and_refused_while_all_others_are_served(make_pool: MakePool) -> None:
    pool = make_pool("Trouble", workers=3, config=FAST).start()
    load = Load(pool, rate=60, sample={"do": "sleep", "s": 0.01})
    load.wait_for(30)
    with pool.client() as client:
        assert client.call({"do": "kill"}, within=20.0)[0]["code"] == "poison"
        deaths = sum(w["restarts"] for w in pool.wait(lambda s: s["pool"]["workers_ready"] == 3)["workers"])
        assert client.call({"do": "kill"}, within=5.0)[0]["code"] == "poison"
    assert deaths == 2
    assert set(load.stop()) == {"ok"}
    assert sum(w["restarts"] for w in pool.status()["workers"]) == 2


@pytest.mark.parametrize("stage", ["preprocess", "postprocess"])
def test_what_kills_beside_the_batch_is_poison_too(make_pool: MakePool, stage: str) -> None:
    pool = make_pool("TroubleBeside", workers=3, config=FAST).start()
    load = Load(pool, rate=60, sample={"do": "nothing"})
    load.wait_for(30)
    with pool.client() as client:
        assert client.call({"do": "kill", "in": stage}, within=20.0)[0]["code"] == "poison"
    assert sum(w["restarts"] for w in pool.wait(lambda s: s["pool"]["workers_ready"] == 3)["workers"]) == 2
    assert set(load.stop()) == {"ok"}


def test_of_two_in_preprocess_the_one_that_kills_is_poison_and_the_bystander_is_served(make_pool: MakePool) -> None:
    pool = make_pool("TroubleForTwo", workers=1, config=f"preprocess_threads = 2\n{FAST}").start()
    with pool.client() as client:
        killer, bystander = client.send({"do": "kill"}), client.send({"do": "bystand"})
        replies = client.collect(2)
        assert replies[killer][0]["code"] == "poison"
        assert (replies[bystander][0]["code"], replies[bystander][0]["attempts"]) == ("ok", 2)
    assert pool.wait(lambda s: s["pool"]["ready"])["workers"][0]["restarts"] == 2


def test_what_kills_in_preprocess_while_its_worker_stops_is_poison_and_what_waited_behind_it_is_served(
    make_pool: MakePool,
) -> None:
    config = FAST.replace("stop_timeout_s = 2.0", "stop_timeout_s = 60.0").replace(
        "batch_timeout_s = 3.0", "batch_timeout_s = 100.0"
    )
    pool = make_pool("Gated", config=config)
    pool.file.write_text(pool.file.read_text().replace("[pool]", "[pool]\ndrain_timeout_s = 0.2"))
    pool.start()
    gate = pool.folder / "gate"
    assert pool.cli("drain", "1").returncode == 0
    with pool.client() as client:
        killer = client.send({"i": 1, "gate": str(gate), "signal": "SIGSEGV"})
        pool.wait(lambda _: pool.notes("preprocess"))
        bystander = client.send({"i": 2})
        pool.wait(lambda s: s["workers"][0]["queue_length"] == 2)
        assert pool.cli("resume", "1").returncode == 0
        assert pool.cli("restart-worker", "0", "--no-wait").returncode == 0
        header, _ = client.collect(1)[bystander]
        assert (header["code"], header["attempts"], header["worker"]) == ("ok", 1, 1)
        gate.touch()
        assert client.collect(1)[killer][0]["code"] == "poison"
    assert [n["i"] for n in pool.notes("preprocess")] == [1, 2, 1]
    (leaving,) = pool.records("worker_leaving", least=1)
    assert leaving["returned"] == 1


def test_poison_is_listed_and_cleared_from_the_shell(make_pool: MakePool) -> None:
    pool = make_pool("Trouble", workers=2, config=FAST).start()
    with pool.client() as client:
        assert client.call({"do": "kill"}, within=20.0)[0]["code"] == "poison"
        pool.wait(lambda s: s["pool"]["workers_ready"] == 2)
        assert client.call({"do": "kill"}, within=5.0)[0]["code"] == "poison"

        listed = json.loads(pool.cli("poison", "list", "--json").stdout)
        (entry,) = listed["poison"]
        assert (listed["poisoned"], entry["worker_deaths"], entry["refused"]) == (1, 2, 1)
        assert [r["hash"] for r in pool.records("request_poisoned", least=1)] == [entry["hash"]]
        assert entry["hash"] in client.call({"do": "kill"}, within=5.0)[0]["message"]
        assert pool.cli("poison", "clear", "0123456789").returncode == 1
        assert json.loads(pool.cli("poison", "clear", entry["hash"][:6], "--json").stdout) == {"cleared": 1}
        assert pool.status()["router"]["poison"] == []
        assert client.call({"do": "kill"}, retry=False, within=20.0)[0]["code"] == "worker_lost"


def test_a_hung_batch_is_ended_at_its_limit_with_its_stacks_in_the_log(make_pool: MakePool) -> None:
    pool = make_pool("Trouble", config=FAST).start()
    load = Load(pool, rate=60, sample={"do": "sleep", "s": 0.02})
    load.wait_for(10)
    with pool.client() as client:
        assert client.call({"do": "hang"}, retry=False, within=15.0)[0]["code"] == "worker_lost"
    pool.wait(lambda s: s["pool"]["workers_ready"] == 2)
    assert set(load.stop()) == {"ok"}
    assert any("toy_models.py" in r["line"] for _ in until(10.0) for r in pool.records("output"))


def test_a_frozen_worker_is_replaced_and_loses_nothing(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", options="seconds = 0.02", config=FAST).start()
    load = Load(pool, rate=60)
    load.wait_for(30)
    old = pool.worker(0)["pid"]
    os.kill(old, signal.SIGSTOP)
    pool.wait(lambda s: s["workers"][0]["pid"] not in (None, old) and s["pool"]["workers_ready"] == 2, within=20.0)
    assert set(load.stop()) == {"ok"}


def test_busy_is_not_dead(make_pool: MakePool) -> None:
    pool = make_pool("Trouble", config=FAST).start()
    with pool.client() as client:
        assert client.call({"do": "spin", "s": 2.0}, within=15.0)[0]["code"] == "ok"
    assert all(w["restarts"] == 0 for w in pool.status()["workers"])


def test_a_model_that_cannot_be_loaded_backs_off_and_comes_by_itself_when_it_is_mended(
    make_pool: MakePool, tmp_path: object
) -> None:
    fixed = f"{tmp_path}/fixed"
    pool = make_pool("BadLoad", options=f'fixed = "{fixed}"', config=FAST).start(ready=False)
    status = pool.wait(lambda s: all(w["restarts"] >= 2 for w in s["workers"]))
    assert not status["pool"]["ready"]
    assert "this model cannot be loaded" in status["workers"][0]["last_exit"]["cause"]
    with pool.client() as client:
        assert client.call({})[0]["code"] == "no_workers"
        open(fixed, "w").close()
        pool.wait(lambda s: s["pool"]["workers_ready"] == 2)
        assert client.call({})[0]["code"] == "ok"


def test_crashing_too_often_parks_and_resume_starts_again(make_pool: MakePool, tmp_path: object) -> None:
    fixed = f"{tmp_path}/fixed"
    config = FAST.replace("restart_delays_s = [0.0, 0.5, 1.0]", "restart_delays_s = [0.0]\nmax_restarts = 2")
    pool = make_pool("BadLoad", options=f'fixed = "{fixed}"', config=config).start(ready=False)
    pool.wait(lambda s: all(w["state"] == "parked" for w in s["workers"]))
    assert pool.status()["pool"]["state"] == "failed"
    open(fixed, "w").close()
    assert pool.cli("resume", "--all").returncode == 0
    pool.wait(lambda s: s["pool"]["workers_ready"] == 2)


@pytest.mark.parametrize("moment", ["idle", "in a batch", "loading", "after a respawn"])
def test_no_child_outlives_a_killed_supervisor_and_the_next_one_starts(make_pool: MakePool, moment: str) -> None:
    pool = make_pool("SlowLoad" if moment == "loading" else "Sleep", options="seconds = 2", config=FAST)
    pool.start(ready=moment != "loading")
    if moment == "loading":
        pool.wait(lambda s: any(w["state"] == "loading" for w in s["workers"]))
    elif moment == "after a respawn":
        os.kill(pool.worker(0)["pid"], signal.SIGKILL)
        pool.wait(lambda s: s["workers"][0]["incarnation"] == 2 and s["pool"]["workers_ready"] == 2)
    with pool.client() as client:
        if moment == "in a batch":
            client.send({"sleep": 2})
            pool.wait(lambda s: any(w["running"] for w in s["workers"]))
        children = [pid for pid in pool.pids() if pid != pool.pid]
        assert len(children) >= 3
        os.kill(pool.pid, signal.SIGKILL)
        assert pool.process
        pool.process.wait(5)
        for _ in until(5.0):
            if not any(alive(pid) for pid in children):
                break
        assert not [pid for pid in children if alive(pid)]
    pool.start()


def test_a_killed_router_is_replaced_and_workers_come_back_to_it(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST).start()
    os.kill(pool.status()["router"]["pid"], signal.SIGKILL)
    pool.wait(lambda s: s["router"]["restarts"] == 1 and s["pool"]["workers_ready"] == 2)
    assert all(w["restarts"] == 0 for w in pool.status()["workers"])
    with pool.client() as client:
        assert client.call({"after": 1})[0]["code"] == "ok"


def test_many_deaths_leave_no_trace_in_the_supervisor(make_pool: MakePool) -> None:
    config = FAST.replace("restart_delays_s = [0.0, 0.5, 1.0]", "restart_delays_s = [0.0]\nmax_restarts = 1000")
    pool = make_pool(config=config).start()

    def footprint() -> tuple[int, int]:
        return len(os.listdir(f"/proc/{pool.pid}/fd")), len(os.listdir(f"/proc/{pool.pid}/task"))

    def kill() -> None:
        before = pool.worker(0)
        os.kill(before["pid"], signal.SIGKILL)
        pool.wait_for_incarnation(0, before["incarnation"] + 1)

    kill()
    before = footprint()
    for _ in range(15):
        kill()
    after = footprint()
    assert abs(after[0] - before[0]) <= 2
    assert after[1] == before[1]
    zombies = [p for p in os.listdir("/proc") if p.isdigit() and _is_zombie_of(int(p), pool.pid)]
    assert not zombies


def _is_zombie_of(pid: int, parent: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, ppid = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and int(ppid) == parent
