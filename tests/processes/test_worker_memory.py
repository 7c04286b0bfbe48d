"""Memory of real workers on CPU devices: what does not fit, what is lost over time, what is told of it, and snapshots."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Callable

import pytest

from support.running import FAST, Load, RunningPool, until

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]

MIB = 1 << 20
HUNGRY = "hungry_model:Hungry"


def limited(mebibytes: int, batching: str = "") -> str:
    return f"{FAST}\n[memory]\ncpu_limit_bytes = {mebibytes * MIB}\n[batching]\n{batching}\n"


def metrics(pool: RunningPool) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/metrics", timeout=5) as page:
        lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.parametrize(("how", "limit"), [("numpy", 300), ("torch", 700), ("pieces", 300), ("objects", 300)])
def test_a_worker_survives_one_failure_after_another_and_nobody_else_notices(make_pool: MakePool, how: str, limit: int) -> None:
    """Whatever fails: one block, many small ones that leave nothing to anybody, Python's own objects."""
    if how != "objects":
        pytest.importorskip("torch" if how == "torch" else "numpy")
    config = limited(limit, "max_batch = 2\nmin_batch = 1")
    pool = make_pool(HUNGRY, workers=1, options=f"how = '{how}'", config=config).start()
    codes: Counter[str] = Counter()
    with pool.client() as client:
        for _ in range(15):
            for sample in ({"length": 1 << 20}, {"length": 1, "pad": b"x" * 300_000}, {"length": 1}):
                client.send(sample)
            codes += Counter(header["code"] for header, _ in client.collect(3, within=60.0).values())

    assert codes == {"out_of_memory": 15, "ok": 30}
    assert pool.worker(0)["incarnation"] == 1
    pool.wait(lambda s: s["workers"][0]["oom_total"] >= 15)


def test_a_plan_is_told_in_status_and_metrics_and_follows_a_reload(make_pool: MakePool) -> None:
    pytest.importorskip("numpy")
    pool = make_pool(HUNGRY, workers=1, options="warm = [4, 16]", config=limited(400, "length_buckets = [8, 16]")).start()

    memory = pool.worker(0)["memory"]
    long, short = memory["plan"][1], memory["plan"][0]
    assert (short["bucket"], long["bucket"]) == (8, 16)
    assert long["per_sample_bytes"] == pytest.approx(16 * MIB, rel=0.1)
    assert short["per_sample_bytes"] == pytest.approx(4 * MIB, rel=0.25)
    assert memory["budget_bytes"] == 400 * MIB
    assert 0.6 * long["ceiling"] <= long["limit"] <= 0.7 * long["ceiling"]
    assert metrics(pool)['gpupool_memory_budget_bytes{worker="0"}'] == 400 * MIB

    pool.file.write_text(pool.file.read_text().replace(str(400 * MIB), str(800 * MIB)))
    assert pool.ask("reload")["result"]["applied"] == ["memory.cpu_limit_bytes"]
    grown = pool.wait(lambda s: s["workers"][0]["memory"]["budget_bytes"] == 800 * MIB)["workers"][0]["memory"]["plan"][1]
    assert grown["ceiling"] == pytest.approx(long["ceiling"] + 25, abs=2)
    assert len(pool.records("memory_planned", least=2)) == 2


def test_a_worker_that_has_lost_its_memory_is_recycled_and_its_count_of_failures_goes_on(make_pool: MakePool) -> None:
    pytest.importorskip("numpy")
    config = limited(300, "max_batch = 4").replace("stable_after_s = 5.0", "stable_after_s = 0.5")
    pool = make_pool(HUNGRY, workers=2, options=f"keep = {4 * MIB}, warm = []", config=config).start()
    load = Load(pool, rate=40, sample={"length": 4})
    try:
        for _ in until(60.0, every=0.1):
            counts = [w["oom_total"] for w in pool.status()["workers"]]
            if pool.records("worker_recycled"):
                break
        pool.wait(lambda s: all(w["incarnation"] > 1 for w in s["workers"]), within=90.0)
    finally:
        codes = load.stop()

    assert set(codes) <= {"ok", "out_of_memory"}
    assert all(w["oom_total"] >= before for w, before in zip(pool.status()["workers"], counts, strict=True))
    assert not pool.records("worker_parked")
    assert metrics(pool)['gpupool_worker_restarts_total{worker="0",reason="recycle"}'] >= 1
    assert not pool.records("worker_exited")  # which tells of deaths


def hungry_before(make_pool: MakePool, options: str = "warm = []") -> RunningPool:
    """One worker with four threads for preprocess and 600 MB, of which some 200 MB are its own."""
    pytest.importorskip("numpy")
    config = (
        limited(572)
        .replace("stable_after_s = 5.0", "stable_after_s = 0.5")
        .replace("batch_timeout_s = 3.0", "batch_timeout_s = 20.0")
    )
    config = f"preprocess_threads = 4\n{config}"
    return make_pool("hungry_model:HungryBefore", workers=1, options=options, config=config).start()


def codes_of(pool: RunningPool, count: int, **sample: object) -> Counter[str]:
    with pool.client() as client:
        for n in range(count):
            client.send({"n": n, **sample}, timeout_ms=60_000)
        return Counter(header["code"] for header, _ in client.collect(count, within=60.0).values())


def test_samples_that_fit_alone_are_not_refused_because_others_were_in_preprocess(make_pool: MakePool) -> None:
    pool = hungry_before(make_pool)

    for mebibytes in (120, 300):
        assert codes_of(pool, 12, length=mebibytes, seconds=0.05) == {"ok": 12}
    assert codes_of(pool, 4, length=900) == {"out_of_memory": 4}
    assert pool.worker(0)["incarnation"] == 1
    pool.wait(lambda s: s["workers"][0]["oom_total"] == 4)


def test_a_worker_is_of_use_again_after_floods_that_fill_its_memory_in_pieces(make_pool: MakePool) -> None:
    """Because its heap has shrunk, or because it was replaced."""
    pool = hungry_before(make_pool)
    assert set(codes_of(pool, 12, length=700, how="pieces", seconds=0.05)) == {"out_of_memory"}

    for _ in until(60.0):
        if codes_of(pool, 1, length=300) == {"ok": 1}:
            break
    assert not pool.records("worker_exited")


def test_a_worker_whose_memory_was_lost_in_preprocess_is_recycled(make_pool: MakePool) -> None:
    pool = hungry_before(make_pool, f"warm = [], keep = {10 * MIB}")
    codes: Counter[str] = Counter()
    for _ in until(60.0, every=0.0):
        codes += codes_of(pool, 1, length=200)
        if codes["out_of_memory"] == 3:  # and no more: there is memory left for all else
            break
    pool.wait(lambda s: s["workers"][0]["incarnation"] == 2 and s["workers"][0]["state"] == "ready", within=60.0)

    assert set(codes) == {"ok", "out_of_memory"}
    assert codes_of(pool, 1, length=200) == {"ok": 1}
    assert pool.records("worker_recycled", least=1)
    assert not pool.records("worker_exited")


def test_requests_that_wait_are_no_memory_lost(make_pool: MakePool) -> None:
    """Whoever sends samples that are too large, and large on the wire besides, has no worker replaced."""
    pytest.importorskip("numpy")
    config = limited(600, "max_batch = 1\nmin_batch = 1").replace("stable_after_s = 5.0", "stable_after_s = 0.5")
    pool = make_pool(HUNGRY, workers=1, options="warm = []", config=config).start()
    with pool.client() as client:
        for _ in range(8):
            client.send({"length": 1 << 20, "pad": bytes(30 * MIB)}, timeout_ms=60_000)
        codes = Counter(header["code"] for header, _ in client.collect(8, within=60.0).values())
    for _ in until(30.0):
        if pool.records("memory_looked_at") or pool.records("worker_recycled"):
            break

    assert codes == {"out_of_memory": 8}
    assert pool.worker(0)["incarnation"] == 1
    assert not pool.records("worker_recycled")
    assert pool.records("memory_looked_at", least=1)


def test_a_snapshot_names_what_is_kept_and_the_service_goes_on(make_pool: MakePool) -> None:
    pytest.importorskip("numpy")
    pool = make_pool(HUNGRY, workers=1, options=f"keep = {MIB}").start()
    load = Load(pool, rate=50, sample={"length": 1})
    out = pool.folder / "mine.json"
    done = pool.cli("snapshot", "0", "--seconds", "1", "--out", str(out), "--json")
    codes = load.stop()

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == [str(out)]
    document = json.loads(out.read_text())
    assert document["worker"] == 0
    assert document["between_batches"]
    assert any("hungry_model.py" in place for place in document["largest"][0]["where"])
    assert document["largest"][0]["bytes"] >= MIB
    assert set(codes) == {"ok"}
    assert pool.cli("snapshot", "7").returncode == 1


def test_a_snapshot_of_what_is_not_there_is_refused(make_pool: MakePool) -> None:
    pool = make_pool(workers=2, config=FAST).start()
    pool.ask("drain", workers=["1"])
    pool.wait(lambda s: s["workers"][1]["state"] == "drained")

    assert pool.ask("snapshot", worker="0", seconds=-1)["error"]["code"] == "bad_request"
    assert pool.ask("snapshot", worker="2", seconds=0)["error"]["code"] == "unknown_worker"
    assert pool.ask("snapshot", worker="1", seconds=0)["ok"]  # drained: its models are there
