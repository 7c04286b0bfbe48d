"""A pool on pretended cards: the real nvidia-ml-py over a fake NVML, the real probe, real workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.fake_cards import BUSES, UUIDS, FakeCards
from support.running import FAST, Load, RunningPool

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]
#: Slot of each card: bus order is not the order of enumeration.
ORDER = sorted(range(4), key=lambda n: BUSES[n])


def host(make_pool: MakePool, tmp_path: Path, model: str = "Sleep", **options: Any) -> tuple[RunningPool, FakeCards]:
    """Four cards and a pool on all of them."""
    cards = FakeCards(tmp_path)
    pool = make_pool(model, options="seconds = 0.02" if model == "Sleep" else "", config=FAST, **options)
    pool.env |= cards.environment()
    pool.env["PYTHONPATH"] = f"{Path(__file__).parents[1] / 'support/no_torch'}:{pool.env['PYTHONPATH']}"
    pool.file.write_text(pool.file.read_text().replace('devices = "cpu:2"', 'devices = "auto"'))
    return pool, cards


def uuid_of(slot: int) -> str:
    return UUIDS[ORDER[slot]]


def test_each_worker_is_pinned_to_one_card_by_uuid_in_bus_order(make_pool: MakePool, tmp_path: Path) -> None:
    pool, _ = host(make_pool, tmp_path)
    pool.start()
    status = pool.wait(lambda s: all(w["device"]["memory_total_bytes"] for w in s["workers"]))
    assert [w["device"]["id"] for w in status["workers"]] == [uuid_of(n) for n in range(4)]
    assert {n["visible"] for n in pool.notes("load")} == set(UUIDS)
    assert {w["device"]["health"] for w in status["workers"]} == {"ok"}


def test_a_card_that_falls_off_the_bus_costs_its_worker_and_no_request_and_comes_back(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool, cards = host(make_pool, tmp_path)
    pool.start()
    load = Load(pool, rate=100)
    load.wait_for(50)
    cards.say(f"event {uuid_of(1)} xid 79")
    cards.say(f"gpu {uuid_of(1)} state=lost")
    status = pool.wait(lambda s: s["workers"][1]["state"] == "lost")
    lost = status["workers"][1]
    assert (lost["device"]["id"], lost["device"]["health"]) == (uuid_of(1), "lost")
    assert "79" in lost["reason"]
    assert status["pool"]["batch_factor"] < 1.0
    assert [w["restarts"] for w in status["workers"]] == [0, 0, 0, 0]
    load.wait_for(50)
    cards.say(f"gpu {uuid_of(1)} state=ok")
    pool.wait(lambda s: s["workers"][1]["state"] == "ready" and s["pool"]["batch_factor"] == 1.0, within=90.0)
    assert set(load.stop()) == {"ok"}
    limits = pool.records("limits_set", least=1)[0]
    judged = pool.records("card_lost", least=1)[0]
    assert limits["time"] - judged["time"] < 0.2


def test_an_application_fault_replaces_one_worker_and_judges_no_card(make_pool: MakePool, tmp_path: Path) -> None:
    pool, cards = host(make_pool, tmp_path)
    pool.start()
    cards.say(f"event {uuid_of(2)} xid 13")
    status = pool.wait(lambda s: s["workers"][2]["incarnation"] == 2 and s["pool"]["workers_ready"] == 4)
    assert [w["restarts"] for w in status["workers"]] == [0, 0, 1, 0]
    assert status["workers"][2]["device"]["health"] == "ok"


def test_a_double_bit_error_quarantines_the_card_also_over_a_restart_of_the_supervisor(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool, cards = host(make_pool, tmp_path)
    pool.start()
    cards.say(f"gpu {uuid_of(0)} recovery=1")
    cards.say(f"event {uuid_of(0)} xid 48")
    pool.wait(lambda s: s["workers"][0]["state"] == "quarantined")
    assert pool.cli("status").returncode == 6
    assert pool.process
    pool.process.terminate()
    assert pool.process.wait(20) == 0
    pool.start(ready=False)
    status = pool.wait(lambda s: s["pool"]["workers_ready"] == 3)
    assert status["workers"][0]["state"] == "quarantined"
    assert status["workers"][0]["pid"] is None
    assert "reset" in status["workers"][0]["device"]["needs"]
    assert pool.cli("resume", "0").returncode == 1  # the driver still asks for the reset
    cards.say(f"gpu {uuid_of(0)} recovery=0")
    pool.wait(lambda s: s["workers"][0]["state"] == "ready", within=60.0)


def test_drains_survive_a_restart_of_the_supervisor(make_pool: MakePool, tmp_path: Path) -> None:
    pool, _ = host(make_pool, tmp_path)
    pool.start()
    assert pool.cli("drain", "3").returncode == 0
    assert pool.process
    pool.process.kill()
    pool.process.wait(10)
    pool.start(ready=False)
    pool.wait(lambda s: s["workers"][3]["state"] == "drained" and s["pool"]["workers_ready"] == 3)


def test_a_driver_that_hangs_for_ever_is_nobodys_problem_but_the_probes(make_pool: MakePool, tmp_path: Path) -> None:
    pool, cards = host(make_pool, tmp_path)
    pool.start()
    load = Load(pool, rate=50)
    cards.say("hang nvmlDeviceGetTemperature forever")
    status = pool.wait(lambda s: all(w["device"]["health"] == "unknown" for w in s["workers"]), within=60.0)
    assert status["pool"]["workers_ready"] == 4
    slowest = 0.0
    for _ in range(10):
        began = time.monotonic()
        pool.status()
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 1.0  # far below any time-out of the driver's; the figure itself is for the benchmark
    assert set(load.stop()) == {"ok"}
    assert [w["restarts"] for w in pool.status()["workers"]] == [0, 0, 0, 0]


def test_a_hot_card_gets_smaller_batches_and_is_never_restarted(make_pool: MakePool, tmp_path: Path) -> None:
    pool, cards = host(make_pool, tmp_path)
    pool.start()
    cards.say(f"gpu {uuid_of(1)} throttle=0x40")
    status = pool.wait(lambda s: s["workers"][1]["batch_limit"] == 16, within=90.0)
    assert [w["batch_limit"] for w in status["workers"]] == [32, 16, 32, 32]
    assert [w["restarts"] for w in status["workers"]] == [0, 0, 0, 0]


def test_release_device_lets_go_of_the_card_until_it_is_resumed(make_pool: MakePool, tmp_path: Path) -> None:
    pool, _ = host(make_pool, tmp_path)
    pool.start()
    load = Load(pool, rate=50)
    load.wait_for(20)
    assert pool.cli("release-device", "2").returncode == 0
    status = pool.wait(lambda s: s["workers"][2]["state"] == "stopped")
    assert status["workers"][2]["device"]["released"]
    pool.wait(lambda _: "gpupool.supervisor.cards.probe" not in " ".join(command_lines(pool)))
    assert pool.cli("resume", "2").returncode == 0
    pool.wait(lambda s: s["pool"]["workers_ready"] == 4)
    assert set(load.stop()) == {"ok"}


def test_gpus_that_cannot_be_seen_are_not_quietly_replaced_by_the_cpu(make_pool: MakePool, tmp_path: Path) -> None:
    pool, cards = host(make_pool, tmp_path)
    cards.say("fail nvmlInit LIB_RM_VERSION_MISMATCH")
    pool.start(ready=False)
    assert pool.process
    assert pool.process.wait(30) == 1  # not 78: systemd shall try again
    assert "cannot see the GPUs" in pool.text()


def test_a_card_that_is_lost_at_the_start_keeps_its_slot_and_takes_nobody_elses(make_pool: MakePool, tmp_path: Path) -> None:
    pool, cards = host(make_pool, tmp_path)
    cards.say(f"gpu {uuid_of(1)} state=lost")
    names = ", ".join(f'"{uuid_of(n)}"' for n in range(4))
    text = pool.file.read_text()
    pool.file.write_text(text.replace('devices = "auto"', "devices = [0, 1, 2, 3]"))
    pool.start(ready=False)
    assert pool.process
    assert pool.process.wait(30) == 1
    assert "name UUIDs" in pool.text()
    pool.file.write_text(text.replace('devices = "auto"', f"devices = [{names}]"))
    pool.start(ready=False)
    status = pool.wait(lambda s: s["workers"][1]["state"] == "lost" and s["pool"]["workers_ready"] == 3)
    assert [w["device"]["id"] for w in status["workers"]] == [uuid_of(n) for n in range(4)]
    cards.say(f"gpu {uuid_of(1)} state=ok")
    pool.wait(lambda s: s["pool"]["workers_ready"] == 4, within=120.0)


def test_a_host_without_nvml_serves_from_the_cpu_with_one_warning(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    pool.file.write_text(pool.file.read_text().replace('devices = "cpu:2"', 'devices = "auto"'))
    pool.start()
    assert len(pool.records("devices_passed_over", least=1)) == 1
    assert pool.worker(0)["device"]["kind"] == "cpu"


def command_lines(pool: RunningPool) -> list[str]:
    """Command lines of the pool's processes."""
    lines = []
    for pid in pool.pids():
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return lines
