"""What a pool writes while things go wrong, and that no way of losing its log costs a request."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable

import pytest

from support.forward_receiver import ForwardReceiver
from support.log_lines import check
from support.running import FAST, Load, RunningPool, until

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]
MARKER = "marker-of-a-payload"


def test_every_line_of_a_pool_under_faults_is_as_documented_and_reaches_fluentd(make_pool: MakePool) -> None:
    """One pool, since starting it costs most: faults, levels, sampling, and a receiver that dies and comes back."""
    receiver = ForwardReceiver()
    logs = f'[logs]\nfluentd = "{receiver.address}"\nrequest_sample = 0.0\n'
    pool = make_pool("Trouble", config=FAST + logs).start()
    with pool.client() as client:
        # Levels: by component, seen in its lines and in the status document, falling back by themselves.
        assert pool.cli("log-level", "0", "debug").returncode == 0
        assert pool.cli("log-level", "supervisor", "warning", "--for", "0.1").returncode == 0
        assert pool.cli("log-level", "pump", "debug").returncode == 1
        assert pool.cli("log-level", "router", "loud").returncode == 1
        for _ in until(10.0):
            client.call({"i": 1})
            if pool.records("batch"):
                break
        assert {r["worker"] for r in pool.records("batch")} == {0}
        status = pool.wait(lambda s: len(s["logs"]["asked"]) == 1)
        assert status["logs"]["asked"][0]["component"] == "worker 0"
        assert 500 < status["logs"]["asked"][0]["for_s"] <= 600
        assert pool.records("log_levels_back", least=1)[0]["components"] == ["supervisor"]

        # Faults: each told in lines of the form, none with what the sample held.
        for n in range(20):
            client.call({"i": n, "text": MARKER})
        assert client.call({"i": 1, "do": "raise", "text": MARKER})[0]["code"] == "model_error"
        assert client.call({"i": 1}, model="nobody's")[0]["code"] == "unknown_model"
        client.socket.send_multipart([b"\xff", MARKER.encode()])
        receiver.close()
        client.call({"i": 1, "do": "kill", "signal": "SIGSEGV", "text": MARKER}, within=20.0)
        pool.wait(lambda s: s["pool"]["ready"] and not s["pool"]["degraded"])

        # Fluentd comes back: what was written meanwhile arrives.
        with ForwardReceiver(receiver.port) as second:
            exits = [r["time"] for r in pool.records("worker_exited", least=1)]
            second.wait(lambda: {r["time"] for r in second.records if r["event"] == "worker_exited"} >= set(exits), within=10.0)
            up = pool.wait(lambda s: s["router"]["log"]["forwarding"]["up"], within=10.0)
            assert up["router"]["log"]["losses"] == {}
            assert up["logs"]["supervisor"]["forwarding"]["sent"] > 0
            pool.wait(lambda s: all(w.get("log", {}).get("forwarding", {}).get("up") for w in s["workers"]))
            pool.close()
            assert second.problems == receiver.problems == []
            for record in receiver.records + second.records:
                check(json.dumps(record, ensure_ascii=False, separators=(",", ":")))
            arrived = Counter(_key(r) for r in receiver.records + second.records)

    lines = (pool.folder / "err").read_text().splitlines()
    for line in lines:
        check(line)
    records = [json.loads(line) for line in lines]
    assert MARKER not in "\n".join(lines)
    # The sample is empty, the errors are all there.
    codes = Counter(r["code"] for r in records if r["event"] == "request")
    assert "ok" not in codes
    assert codes["model_error"] == codes["unknown_model"] == 1
    # A crash dump comes wrapped, with its source.
    assert any("Segmentation fault" in r["line"] for r in records if r["event"] == "output" and r["source"] == "stderr")
    # All that was written arrived, but for what a process killed by its own fault had not sent yet.
    killed = {r["child"] for r in records if r["event"] == "worker_exited"}
    assert [r for r in records if not arrived[_key(r)] and r["pid"] not in killed and r["component"] != "probe"] == []


@pytest.mark.parametrize("log", ["full disk", "closed pipe"])
def test_a_log_that_cannot_be_written_costs_no_request(make_pool: MakePool, log: str) -> None:
    config = FAST + ('[logs]\nfile = "/dev/full"\n' if log == "full disk" else "")
    pool = make_pool("Echo", config=config)
    if log == "closed pipe":
        reader, pool.stderr = os.pipe()
        os.close(reader)
    pool.start()
    if pool.stderr is not None:
        os.close(pool.stderr)

    load = Load(pool, rate=300)
    load.wait_for(300)

    assert set(load.stop()) == {"ok"}
    lost = pool.wait(lambda s: s["router"]["log"]["losses"].get("info", 0) >= 300)
    assert lost["log_records_dropped"]["info"] > 0


def _key(record: dict[str, object]) -> str:
    return json.dumps([record["time"], record["event"], record["pid"]])
