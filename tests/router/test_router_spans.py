"""The way of spans out of the router: what they say, and what becomes of them where no collector takes them."""

from __future__ import annotations

import gzip
import random
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpupool.link import Marks
from gpupool.logs import Log
from gpupool.router.span_export import MAX_WAITING, SpanExport
from gpupool.router.tracing import Attempt, Finished, Sampler, Trace
from gpupool.spec import LogSpec, TraceSpec
from support.otlp_receiver import OtlpReceiver
from support.running import until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from gpupool.router.collector_http import MAX_ANSWER_BYTES, Deadline, open_session
from gpupool.router.spans import SpanBuilder, open_exporter

SPEC = TraceSpec("http://127.0.0.1:9/v1/traces", sample=1.0, devices=("cpu:0", "cpu:1"))


def finished(number: int = 0, *, marks: Marks | None = None, code: str = "ok", attempts: Sequence[Attempt] = ()) -> Finished:
    trace = Sampler(SPEC, random.Random(number)).begin(None, 0.0)
    assert trace is not None
    trace.attempts += attempts
    return Finished(trace, f"r{number}", "m", "1", 1, code, 1, 2, 5, 10, 100.0, 101.0, 110.0, 3, 1.0, 2.0, marks)


def marks(batch: int, batch_at: float = 105.0) -> Marks:
    return Marks(101.5, 102.0, 105.0, 107.0, 107.5, 109.0, batch, batch_at, 3, 64, "min")


def test_stages_have_their_own_times_and_queue_stands_on_both_sides_of_preprocess() -> None:
    spans = SpanBuilder(SPEC, "p").spans([finished(marks=marks(4))], 1000.0)

    told = [(s.name, (s.start_time or 0) / 1e9 - 1000, (s.end_time or 0) / 1e9 - 1000) for s in spans]
    assert told == [
        ("gpupool.request", 100.0, 110.0), ("pending", 100.0, 101.0), ("queue", 101.5, 102.0), ("preprocess", 102.0, 103.0),
        ("queue", 103.0, 105.0), ("forward", 105.0, 107.0), ("postprocess", 107.5, 109.0), ("gpupool.batch", 105.0, 107.0),
    ]  # fmt: skip


def test_a_batch_links_its_requests_and_no_other_batchs() -> None:
    requests = [finished(n, marks=marks(n % 2)) for n in range(4)]
    batches = [s for s in SpanBuilder(SPEC, "p").spans(requests, 0.0) if s.name == "gpupool.batch"]

    linked = [{link.context.span_id for link in s.links} for s in batches]
    assert linked == [{requests[n].trace.span_id for n in pair} for pair in ((0, 2), (1, 3))]
    assert [(s.attributes or {})["gpupool.bucket"] for s in batches] == [64, 64]


def test_the_same_number_in_two_lives_of_a_worker_is_two_batches() -> None:
    requests = [finished(1, marks=marks(1, 105.0)), finished(2, marks=marks(1, 106.0))]

    assert sum(s.name == "gpupool.batch" for s in SpanBuilder(SPEC, "p").spans(requests, 0.0)) == 2


def test_an_id_with_control_characters_stays_out() -> None:
    odd = finished()._replace(request_id="a\x1b[2J")
    root, *_ = SpanBuilder(SPEC, "p").spans([odd], 0.0)

    assert "gpupool.request_id" not in (root.attributes or {})


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log("router", LogSpec(file=str(tmp_path / "log")))


def test_what_no_collector_takes_is_counted_and_told_once(log: Log, tmp_path: Path) -> None:
    with OtlpReceiver(status=500) as failing, socket.create_server(("127.0.0.1", 0)) as silent:
        down = socket.create_server(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{down.getsockname()[1]}/v1/traces"
        down.close()
        endpoints = (failing.endpoint, f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", dead)
        builder = SpanBuilder(SPEC, "p")
        for endpoint in endpoints:
            export = open_exporter(TraceSpec(endpoint), 0.2)
            out = SpanExport(SPEC, "p", log, lambda some, export=export: export(builder.spans(some, 0.0)))  # type: ignore[misc]
            out.put([finished(n, marks=marks(n)) for n in range(10)])
            out.put([finished(n) for n in range(5)])
            assert any(out.stats() == {"sent": 0, "dropped": 15, "waiting": 0} for _ in until(10.0)), endpoint
            out.close()
    log.close()
    assert (tmp_path / "log").read_text().count("traces_not_taken") == len(endpoints)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"
BOMB = gzip.compress(b"\0" * (8 << 20))


@pytest.mark.parametrize(
    ("then", "endless", "pause_s"),
    [
        pytest.param(HEAD, b"x", 0.05, id="body-trickles"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.05, id="head-trickles"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05, id="continues-for-ever"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 0.05, id="chunks-trickle"),
        pytest.param(HEAD, b"x" * 1024, 0.0, id="body-endless"),
        pytest.param(b"HTTP/1.1 307 Moved\r\nLocation: /v1/traces\r\nContent-Length: 0\r\n\r\n", b"", 0.0, id="redirect"),
        pytest.param(b"HTTP/1.1 304 Not Modified\r\n\r\n", b"", 0.0, id="not-modified"),
    ],
)
def test_no_answer_holds_an_export_beyond_its_time_or_counts_as_taken(then: bytes, endless: bytes, pause_s: float) -> None:
    with OtlpReceiver(then=then, endless=endless, pause_s=pause_s) as receiver:
        export = open_exporter(TraceSpec(receiver.endpoint), 0.5)
        took: list[bool] = []
        thread = threading.Thread(
            target=lambda: took.append(export(SpanBuilder(SPEC, "p").spans([finished()], 0.0))), daemon=True
        )
        thread.start()
        thread.join(10.0)

        assert took == [False]
        assert receiver.exports <= 2  # the exporter's own second try of a connection that broke


def test_a_collector_that_reads_slowly_cannot_hold_an_export() -> None:
    """A body goes out in pieces, each of which had a time of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or the kernel takes most of it
        # Making the body is in the time, too.
        export = open_exporter(TraceSpec(f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces"), 2.0)
        spans = SpanBuilder(SPEC, "p").spans([finished()._replace(request_id="x" * 60, model="m" * 4000)] * 2000, 0.0)
        took: list[bool] = []
        thread = threading.Thread(target=lambda: took.append(export(spans)), daemon=True)
        thread.start()
        server.settimeout(10.0)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            for _ in until(20.0):
                if not thread.is_alive() or not connection.recv(4096):
                    break
                time.sleep(0.05)
            thread.join(10.0)
    assert took == [False]


def test_an_answer_is_not_unpacked_and_good_ones_are_taken() -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(BOMB)}\r\n\r\n".encode()
    deadline = Deadline()
    deadline.begin(10.0)
    with OtlpReceiver(then=head + BOMB) as receiver, open_session(deadline) as session:
        answer = session.post(receiver.endpoint, data=b"", timeout=10.0)
        assert len(answer.content) == len(BOMB) < MAX_ANSWER_BYTES
    with OtlpReceiver() as receiver:
        export = open_exporter(TraceSpec(receiver.endpoint), 10.0)
        assert [export(SpanBuilder(SPEC, "p").spans([finished()], 0.0)) for _ in range(3)] == [True] * 3


def test_spans_flow_again_when_the_collector_is_back(log: Log) -> None:
    answers = [False, True]
    out = SpanExport(SPEC, "p", log, lambda _: answers.pop(0))
    for count in (1, 2):
        out.put([finished()])
        assert any(sum(out.stats().values()) == count and not out.stats()["waiting"] for _ in until(10.0))

    assert out.stats() == {"sent": 1, "dropped": 1, "waiting": 0}
    out.close()


def test_never_more_waits_than_the_bound_and_everything_is_counted(log: Log) -> None:
    gate = threading.Event()
    most: list[int] = []

    def slow(_: Sequence[Finished]) -> bool:
        gate.wait(20)
        return True

    out = SpanExport(SPEC, "p", log, slow)
    group = [finished()] * 37
    for _ in range(3 * MAX_WAITING // 37):
        out.put(group)
        most.append(out.stats()["waiting"])
    put = 37 * len(most)
    assert max(most) == MAX_WAITING
    assert sum(out.stats().values()) == put
    gate.set()
    assert any(out.stats()["waiting"] == 0 for _ in until(10.0))
    assert sum(out.stats().values()) == put
    assert out.stats()["sent"] >= MAX_WAITING
    out.close()


def test_an_export_that_is_overdue_is_told_while_it_lasts(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupool.router.span_export.EXPORT_TIMEOUT_S", 0.05)
    gate = threading.Event()
    out = SpanExport(SPEC, "p", log, lambda _: gate.wait(20))
    for _ in until(10.0):
        out.put([finished()])
        if "traces_not_taken" in (tmp_path / "log").read_text():
            break
    else:
        raise AssertionError("not told")
    gate.set()
    out.close()


def test_a_root_without_a_parent_has_none() -> None:
    plain, child = Trace(5, 6, 0, sampled=True), Trace(5, 6, 7, sampled=True)
    roots = [SpanBuilder(SPEC, "p").spans([finished()._replace(trace=t)], 0.0)[0] for t in (plain, child)]

    assert [r.parent and r.parent.span_id for r in roots] == [None, 7]
