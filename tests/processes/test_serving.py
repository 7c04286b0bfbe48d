"""A pool serves: real processes, real sockets, real shared memory."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable

import msgpack
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from support.running import FAST, Load, RunningPool, until

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]


def test_dealer_and_req_clients_are_served_and_the_books_balance(make_pool: MakePool) -> None:
    pool = make_pool().start()
    with pool.client() as client:
        header, body = client.call({"a": 1, "x": b"\x00\xff"})
        assert (header["code"], body) == ("ok", {"a": 1, "x": b"\x00\xff"})
        assert set(header["timings_ms"]) == {"pending", "queue", "preprocess", "forward", "postprocess", "total"}
        header, body = client.call([{"i": k} for k in range(50)], many=True)
        assert (header["code"], body) == ("ok", [{"i": k} for k in range(50)])
        assert client.call(None, type="ping")[0]["code"] == "ok"
        header, body = client.call(None, type="info")
        assert body["models"][0]["name"] == "toy"
    with pool.client(zmq.REQ) as client:
        client.socket.send_multipart([msgpack.packb({"v": 1}), msgpack.packb({"q": 2})])
        reply = client.receive()
        assert reply is not None
        assert (reply[0]["code"], reply[1]) == ("ok", {"q": 2})
    router = pool.status()["router"]
    assert router["accepted_total"] == sum(router["replied_total"].values()) + router["pending"] + router["in_flight"] == 3


def test_a_tensor_in_a_buffer_frame_comes_back(make_pool: MakePool) -> None:
    pool = make_pool().start()
    data = bytes(range(24)) * 4
    with pool.client() as client:
        client.send({"t": {"dtype": "float32", "shape": [2, 12], "data": 0}}, data, id="t")
        client.socket.poll(10_000)
        header, body, *buffers = client.socket.recv_multipart()
        assert msgpack.unpackb(header)["code"] == "ok"
        tensor = msgpack.unpackb(body)["t"]
        assert tensor["shape"] == [2, 12]
        assert (buffers[tensor["data"]] if isinstance(tensor["data"], int) else tensor["data"]) == data


def test_requests_before_the_model_is_loaded_are_refused_and_never_silent(make_pool: MakePool) -> None:
    pool = make_pool("SlowLoad", options="seconds = 3").start(ready=False)
    pool.wait(lambda s: s["router"]["state"] == "ready")
    with pool.client() as client:
        header, _ = client.call({}, within=2.0)
        assert (header["code"], header["retryable"]) == ("no_workers", True)
        status = pool.status()
        assert not status["pool"]["ready"]
        assert {w["state"] for w in status["workers"]} <= {"starting", "loading"}
        assert pool.cli("status").returncode == 5
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/readyz", timeout=5)
        assert refused.value.code == 503
        refused.value.close()
        pool.wait(lambda s: s["pool"]["ready"])
        for n in range(100):
            assert client.call({"n": n})[0]["code"] == "ok"
    for path in ("livez", "readyz"):
        with urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/{path}", timeout=5) as answer:
            assert answer.status == 200


def test_one_bad_sample_fails_alone_and_wrong_counts_fail_their_batch(make_pool: MakePool) -> None:
    pool = make_pool("Trouble", workers=1, config="[batching]\nwindow_ms = 50.0\nadaptive = false\nmin_batch = 8\n").start()
    with pool.client() as client:
        for n in range(8):
            client.send({"i": n, "do": "raise" if n == 4 else ""}, id=str(n))
        replies = client.collect(8)
        assert {k for k, (h, _) in replies.items() if h["code"] != "ok"} == {"4"}
        assert replies["4"][0]["code"] == "model_error"
        assert "sample 4 is bad" in replies["4"][0]["message"]
        assert [replies[str(n)][1]["i"] for n in (0, 7)] == [0, 7]
        for do in ("short", "extra", "none", "generator", "sys_exit"):
            assert client.call({"do": do})[0]["code"] == "model_error", do
        assert client.call({})[0]["code"] == "ok"
    assert pool.worker(0)["restarts"] == 0


def test_odd_results_become_numbers_or_errors_of_their_caller_alone(make_pool: MakePool) -> None:
    pool = make_pool("Odd", workers=1).start()
    with pool.client() as client:
        assert [client.call({"kind": k})[1] for k in ("f32", "i64", "bool", "text", "inf")] == [
            1.5,
            7,
            True,
            "ok",
            float("inf"),
        ]
        assert client.call({"kind": "array"})[1]["shape"] == [3, 2]
        for kind in ("set", "big", "object"):
            assert client.call({"kind": kind})[0]["code"] == "model_error"
    assert pool.worker(0)["restarts"] == 0


def test_two_clients_with_one_id_get_their_own_results(make_pool: MakePool) -> None:
    pool = make_pool("Sleep").start()
    with pool.client() as a, pool.client() as b:
        a.send({"who": "a", "sleep": 0.3}, id="1")
        b.send({"who": "b"}, id="1")
        for client, who in ((b, "b"), (a, "a")):
            reply = client.receive()
            assert reply is not None
            assert reply[1]["who"] == who


def test_a_client_that_restarts_under_its_identity_is_served(make_pool: MakePool) -> None:
    pool = make_pool("Sleep").start()
    first = pool.client(identity=b"app")
    first.call({})
    first.send({"life": 1, "sleep": 0.5}, id="old")
    first.close()
    with pool.client(identity=b"app") as second:
        header, body = second.call({"life": 2}, id="new", within=3.0)
        assert (header["code"], body["life"]) == ("ok", 2)


def test_a_client_that_leaves_costs_nobody_anything(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", workers=1, options="seconds = 0.01").start()
    leaving = pool.client()
    leaving.call({})
    for n in range(100):
        leaving.send({"i": n})
    leaving.close()
    with pool.client() as client:
        assert client.call({})[0]["code"] == "ok"
    pool.wait(lambda s: s["router"]["pending"] == s["router"]["in_flight"] == 0)


def test_logs_are_json_lines_with_one_for_each_request_and_nothing_of_its_body(make_pool: MakePool) -> None:
    pool = make_pool("Trouble", workers=1).start()
    with pool.client() as client:
        for n in range(10):
            client.call({"secret": "MARKER-1f", "i": n, "do": "raise" if n == 3 else ""})
        client.call({"do": "print", "n": 20_000})
    assert pool.process is not None
    pool.process.terminate()
    assert pool.process.wait(20) == 0
    for record in pool.records():
        assert {"time", "timestamp", "level", "event", "component", "pid"} <= set(record), record
    requests = pool.records("request")
    assert len(requests) == 11
    assert {"request_id", "code", "attempts", "batch_size", "input_bytes", "output_bytes", "length", "total_ms"} <= set(
        requests[0]
    )
    assert "MARKER-1f" not in pool.text()
    printed = {r["source"]: r for r in pool.records("output")}
    assert printed["stdout"]["line"].endswith("xxx")
    assert (printed["stderr"]["line"], printed["stderr"]["worker"]) == ("<stderr>", 0)


def test_status_for_people_and_for_programs(make_pool: MakePool) -> None:
    pool = make_pool().start()
    done = pool.cli("status")
    assert done.returncode == 0
    assert "ready" in done.stdout
    document = json.loads(pool.cli("status", "--json").stdout)
    assert document["workers"][1]["device"]["id"] == "cpu:1"
    assert document["pool"]["workers_ready"] == 2


def test_metrics_are_read_by_prometheus_own_parser_and_count_what_was_answered(make_pool: MakePool) -> None:
    pool = make_pool("Trouble").start()
    with pool.client() as client:
        for n in range(5):
            client.call({"i": n, "do": "raise" if n == 2 else ""})
    pool.wait(lambda s: sum(sum(w["batching"]["closed"].values()) for w in s["workers"] if "batching" in w) == 5)
    with urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/metrics", timeout=5) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    requests = {s.labels["code"]: s.value for s in families["gpupool_requests"].samples}
    assert {code: count for code, count in requests.items() if count} == {"ok": 4.0, "model_error": 1.0}
    assert [s.value for s in families["gpupool_worker_up"].samples] == [1.0, 1.0]
    assert families["gpupool_build_info"].samples[0].labels["version"]
    assert families["gpupool_batch_limit"].samples[0].value == 32
    assert sum(s.value for s in families["gpupool_batch_close"].samples) == 5
    sizes = families["gpupool_batch_size"].samples
    assert sum(s.value for s in sizes if s.name == "gpupool_batch_size_count") == 5
    assert sum(s.value for s in sizes if s.name == "gpupool_batch_size_sum") == 5
    assert {s.labels["le"] for s in sizes if s.name == "gpupool_batch_size_bucket"} >= {"1", "32", "+Inf"}


def test_counts_of_batches_go_on_over_a_restart_of_their_worker(make_pool: MakePool) -> None:
    pool = make_pool(workers=1).start()

    def counted() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/metrics", timeout=5) as answer:
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
        closed = families.get("gpupool_batch_close")
        return sum(s.value for s in closed.samples) if closed else 0.0

    with pool.client() as client:
        for n in range(3):
            client.call({"i": n})
        pool.wait(lambda _: counted() == 3)
        assert pool.cli("restart-worker", "0").returncode == 0
        assert counted() == 3
        client.call({"i": 3})
        pool.wait(lambda _: counted() == 4)
    assert sum(pool.worker(0)["batching"]["closed"].values()) == 1, "status tells of the present process"


def test_call_from_the_shell(make_pool: MakePool) -> None:
    pool = make_pool("Trouble").start()
    done = pool.cli("call", '{"hello": "world"}')
    assert (done.returncode, json.loads(done.stdout)["result"]) == (0, {"hello": "world"})
    done = pool.cli("call", '{"do": "raise", "i": 1}')
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (1, "model_error")


def test_threads_are_shared_out_and_a_cpu_worker_sees_no_gpu(make_pool: MakePool) -> None:
    pool = make_pool(workers=2, env={"OMP_NUM_THREADS": ""}).start()  # an empty value is no setting
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [(n["visible"], n["threads"]) for n in pool.notes("load")] == [("", share)] * 2


def test_an_operators_number_of_threads_wins(make_pool: MakePool) -> None:
    pool = make_pool(workers=2, env={"OMP_NUM_THREADS": "7"}).start()
    assert [n["threads"] for n in pool.notes("load")] == ["7", "7"]


def test_a_lone_request_on_an_idle_pool_does_not_wait_for_company(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, config="[batching]\nwindow_ms = 5000.0\n").start()
    with pool.client() as client:
        for n in range(3):
            header, _ = client.call({"i": n})
            assert header["timings_ms"]["queue"] < 2500
            assert header["timings_ms"]["pending"] < 2500
    assert [n["n"] for n in pool.notes()] == [1, 1, 1]


def test_a_burst_while_a_batch_runs_becomes_one_batch(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", workers=1).start()
    with pool.client() as client:
        client.send({"i": "long", "sleep": 0.5})
        pool.wait(lambda s: s["workers"][0]["running"] == 1)
        for n in range(5):
            client.send({"i": n})
        client.collect(6)
    assert [n["n"] for n in pool.notes()][-2:] == [1, 5]


def test_a_stray_signal_to_a_worker_ends_only_that_worker(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST).start()
    load = Load(pool, rate=50)
    load.wait_for(10)
    for number in (signal.SIGTERM, signal.SIGINT):
        before = pool.worker(0)
        os.kill(before["pid"], number)
        pool.wait_for_incarnation(0, before["incarnation"] + 1)
    assert set(load.stop()) == {"ok"}
    assert pool.worker(1)["restarts"] == 0


def test_small_requests_pass_a_large_one_which_gets_most_of_the_worker_all_the_same(make_pool: MakePool) -> None:
    """The large one comes first, to a worker that has answered nothing yet; then two clients ask all the time, one thing at a time."""
    rows = 800
    config = "[batching]\nmax_batch = 8\nmin_batch = 8\nadaptive = false\nwindow_ms = 0.0\nidle_window_ms = 0.0\n"
    pool = make_pool("paced_model:Paced", workers=1, options="fixed_s = 0.0, each_s = 0.005", config=config).start()
    with pool.client() as large, pool.client() as one, pool.client() as two:
        large.send([{"i": k} for k in range(rows)], many=True, timeout_ms=60_000)
        pool.wait(lambda s: s["router"]["in_flight"] == 1)
        calm, answered, reply = (one, two), 0, None
        for client in calm:
            client.send({})
        for _ in until(60.0, every=0.001):
            if (reply := large.receive(0.0)) is not None:
                break
            for client in calm:
                if (small := client.receive(0.0)) is not None:
                    assert small[0]["code"] == "ok"
                    answered += 1
                    client.send({})
    assert reply is not None
    assert reply[0]["code"] == "ok"
    assert 20 <= answered <= rows // 2
