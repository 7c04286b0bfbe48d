"""The Fluentd forward: all arrives at least once, nobody waits for it, and what had to go is counted."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpupool.forward import ATTEMPT_S, BACKOFF_S, Forwarder, backoff_s, pack_entry
from support.forward_receiver import ForwardReceiver
from support.log_lines import check
from support.running import free_port


def record(n: int, level: str = "info", **fields: Any) -> dict[str, Any]:
    return {"time": time.time(), "timestamp": "", "level": level, "event": "test", "component": "router", "n": n, **fields}


@pytest.fixture
def receiver() -> Iterator[ForwardReceiver]:
    with ForwardReceiver() as receiver:
        yield receiver


def stop(forwarder: Forwarder, within: float = 1.0) -> None:
    forwarder.end(within)
    forwarder.join()


def test_ten_thousand_records_arrive_once_and_in_order(receiver: ForwardReceiver) -> None:
    forwarder = Forwarder(receiver.address, "gpupool.router")

    for n in range(10_000):
        forwarder.put(record(n))
    receiver.wait(lambda: len(receiver.records) == 10_000)
    stop(forwarder)

    assert [r["n"] for r in receiver.records] == list(range(10_000))
    assert (receiver.problems, receiver.connections) == ([], 1)
    assert forwarder.state() == {"address": receiver.address, "up": True, "sent": 10_000, "dropped": 0, "waiting": 0}


def test_what_was_not_acknowledged_comes_again_under_the_same_id(receiver: ForwardReceiver) -> None:
    receiver.mode = "stranger"
    event = mock.Mock()
    forwarder = Forwarder(receiver.address, "gpupool.router", event=event)
    forwarder.put(record(1))
    receiver.wait(lambda: len(receiver.chunks) == 1)
    assert not forwarder.state()["sent"]

    receiver.mode = "ack"
    receiver.chunks.clear()
    receiver.wait(lambda: len(receiver.records) == 1)
    stop(forwarder)

    assert [call[1][0] for call in event.method_calls] == ["log_forward_down", "log_forward_up"]
    assert forwarder.state()["sent"] == 1
    assert receiver.connections == 2


@pytest.mark.parametrize(
    "answer", [b"\xdb\x00\x00\x0f\xff", b"\x91", b"\xc1", b"\x81\xa3ack\xa5other", b"\xdd\xff\xff\xff\xff"]
)
def test_no_answer_holds_an_attempt_beyond_its_time(
    receiver: ForwardReceiver, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trickling, without an end, no msgpack, of a stranger, too long."""
    monkeypatch.setattr("gpupool.forward.ATTEMPT_S", 0.4)
    receiver.mode = answer
    event = mock.Mock()
    forwarder = Forwarder(receiver.address, "gpupool.router", event=event)
    forwarder.put(record(1))
    receiver.wait(lambda: bool(event.method_calls), within=10.0)
    stop(forwarder, 0.2)

    assert event.method_calls[0][0] == "warning"
    assert forwarder.state()["sent"] == 0


def test_a_receiver_that_dies_and_comes_back_gets_everything() -> None:
    first = ForwardReceiver()
    forwarder = Forwarder(first.address, "gpupool.router")
    for n in range(100):
        forwarder.put(record(n))
    first.wait(lambda: len(first.records) == 100)
    first.close()
    for n in range(100, 200):
        forwarder.put(record(n))

    with ForwardReceiver(first.port) as second:
        second.wait(lambda: len(second.records) >= 100, within=10.0)
        stop(forwarder)

        assert {r["n"] for r in first.records + second.records} == set(range(200))
        assert second.problems == []
    assert forwarder.state()["dropped"] == 0


@pytest.mark.parametrize("mode", ["hole", "withhold", "gone"])
def test_a_receiver_that_takes_nothing_costs_minor_records_only_and_no_time(receiver: ForwardReceiver, mode: str) -> None:
    receiver.mode = mode
    if mode == "gone":
        receiver.close()
    forwarder = Forwarder(receiver.address, "gpupool.router", size=500)

    slowest = 0.0
    for n in range(3000):
        began = time.monotonic()
        forwarder.put(record(n, "error" if n % 100 == 0 else "info"))
        slowest = max(slowest, time.monotonic() - began)
    state, lost = forwarder.state(), dict(forwarder.dropped)
    began = time.monotonic()
    stop(forwarder, 0.2)

    assert slowest < 1.0
    assert time.monotonic() - began < 2.0
    assert state["waiting"] <= 1500  # the queue's and one chunk's
    assert state["dropped"] >= 1500
    assert state["sent"] == 0
    assert lost.keys() == {"info"}


def test_the_queue_is_bounded_in_bytes_too() -> None:
    forwarder = Forwarder(f"127.0.0.1:{free_port()}", "gpupool.router", size=10_000, max_bytes=100_000)

    for n in range(1000):
        forwarder.put(record(n, text="x" * 3000))

    assert forwarder.state()["waiting"] < 100
    assert forwarder.state()["dropped"] > 900
    stop(forwarder)


def test_what_arrives_has_the_form_of_the_logs_lines_whoever_comes_first(receiver: ForwardReceiver) -> None:
    """The sink's thread fills in the same record's timestamp, sooner or later."""
    shared = record(1, pid=1)
    forwarder = Forwarder(receiver.address, "gpupool.router")
    forwarder.put(shared)
    receiver.wait(lambda: len(receiver.records) == 1)
    stop(forwarder)

    assert shared["timestamp"] == ""
    check(json.dumps(receiver.records[0]))


def test_all_the_addresses_of_a_name_share_the_time_of_one_attempt(receiver: ForwardReceiver) -> None:
    event = mock.Mock()
    with contextlib.ExitStack() as stack:
        port = free_port()
        holes = [stack.enter_context(deaf(f"127.0.9.{n}", port)) for n in range(1, 4)]
        stack.enter_context(mock.patch("socket.getaddrinfo", lambda *_, **__: holes))
        began = time.monotonic()
        forwarder = Forwarder(f"collector.example:{port}", "gpupool.router", event=event)
        forwarder.put(record(1))
        receiver.wait(lambda: event.warning.called)
        took = time.monotonic() - began
        assert took < 2 * ATTEMPT_S, took  # each its own would be three times that

        holes.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", receiver.port)))
        receiver.wait(lambda: len(receiver.records) == 1)
        stop(forwarder)


@contextlib.contextmanager
def deaf(host: str, port: int) -> Iterator[tuple[Any, ...]]:
    """An address that answers no attempt to connect: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((host, port))
        yield socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)


def test_losses_are_told_in_the_stream_when_it_flows_again() -> None:
    port = free_port()
    forwarder = Forwarder(f"127.0.0.1:{port}", "gpupool.router", size=10)
    for n in range(100):
        forwarder.put(record(n))

    with ForwardReceiver(port) as receiver:
        receiver.wait(lambda: any(r["event"] == "log_records_dropped" for r in receiver.records), within=10.0)
        stop(forwarder)

        told = sum(r["dropped"]["info"] for r in receiver.records if r["event"] == "log_records_dropped")
        arrived = sum(r["event"] == "test" for r in receiver.records)
    assert told == forwarder.state()["dropped"] == 100 - arrived


def test_what_waits_at_the_end_still_leaves(receiver: ForwardReceiver) -> None:
    forwarder = Forwarder(receiver.address, "gpupool.router")
    for n in range(3000):
        forwarder.put(record(n))

    stop(forwarder)

    assert len(receiver.records) == 3000


def test_odd_values_are_tamed_and_long_records_cut() -> None:
    assert len(pack_entry(record(1, bad=float("nan"), key={1: b"\xff"}, deep={(1, 2): object()}, huge=1 << 80))) < 4200
    assert len(pack_entry(record(1, text="x" * 100_000))) < 4200


def test_rests_grow_within_their_bounds_and_differ() -> None:
    rng = random.Random(1)
    rests = [backoff_s(n, rng) for n in (1, 2, 3, 4, 5, 50, 5000)]

    assert BACKOFF_S[0] / 2 <= rests[0] <= BACKOFF_S[0]
    assert all(BACKOFF_S[1] / 2 <= rest <= BACKOFF_S[1] for rest in rests[-3:])
    assert backoff_s(5, rng) != backoff_s(5, rng)


SERVER = """
const { FluentServer } = require("@fluent-org/logger");
let records = 0, last = null;
const server = new FluentServer({ listenOptions: { port: Number(process.argv[2]), host: "127.0.0.1" } });
server.on("entry", (tag, time, record) => {
  records++; last = { tag, time: time.epoch + time.nano / 1e9, record };
  if (records === 10000) console.log(JSON.stringify({ records, last }));
});
server.listen().then(() => console.log("listening"));
"""


def test_a_server_of_others_takes_ten_thousand(tmp_path_factory: pytest.TempPathFactory) -> None:
    """npm's FluentServer: what was written from the specification by somebody else."""
    folder = node_module(tmp_path_factory)
    (folder / "server.js").write_text(SERVER)
    port = free_port()
    with subprocess.Popen(["node", "server.js", str(port)], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            assert server.stdout.readline() == "listening\n"
            forwarder = Forwarder(f"127.0.0.1:{port}", "gpupool.router")
            for n in range(10_000):
                forwarder.put(record(n))
            seen = json.loads(server.stdout.readline())
            stop(forwarder)
        finally:
            server.kill()

    assert seen["records"] == 10_000
    assert (seen["last"]["tag"], seen["last"]["record"]["n"]) == ("gpupool.router", 9_999)
    assert abs(seen["last"]["time"] - seen["last"]["record"]["time"]) < 1e-3
    assert forwarder.state() == {"address": f"127.0.0.1:{port}", "up": True, "sent": 10_000, "dropped": 0, "waiting": 0}


def node_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with @fluent-org/logger, made once a run; skips where that cannot be had."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.getbasetemp() / "fluent-server"
    if not folder.exists():
        folder.mkdir()
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefer-offline", "@fluent-org/logger@1.0.10"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install @fluent-org/logger: {done.stderr[-200:]}")
    return folder
