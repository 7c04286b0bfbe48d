"""Traces arrive at a real OTLP receiver, as the collectors of the field would get them; and one that fails harms nobody."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from support.otlp_receiver import OtlpReceiver, Span
from support.running import FAST, RunningPool, until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SERVER, ERROR = 2, 2
STAGES = {"pending", "queue", "preprocess", "forward", "postprocess"}


def request_spans(spans: list[Span]) -> dict[str, Span]:
    """Root spans by the client's id."""
    return {s.attributes["gpupool.request_id"]: s for s in spans if s.name == "gpupool.request"}


def test_spans_tell_the_whole_way_of_a_request(make_pool: MakePool) -> None:
    with OtlpReceiver() as receiver:
        pool = make_pool("TroubleBeside", config=FAST)
        secret = pool.folder / "headers"
        secret.write_text("# for the collector\nAuthorization: Bearer s3cr3t-t0ken\n")
        secret.chmod(0o600)
        traces = f'[traces]\nendpoint = "{receiver.endpoint}"\nsample = 0.0\nheaders_file = "{secret}"\n'
        pool.write(pool.file.read_text().removeprefix(pool.head) + traces)
        pool.start()
        with pool.client() as client:
            flagged = f"00-{TRACE}-{CALLER}-01"
            for name in ("a", "b", "c", "d"):
                client.send({"i": 1, "word": "pay104d"}, id=name, trace=flagged)
            client.send({"i": 1}, id="unflagged", trace=f"00-{TRACE}-{CALLER}-00")
            client.send({"i": 1}, id="malformed", trace="00-xyz")
            client.send({"in": "preprocess"}, id="dies", trace=flagged)
            client.send({"i": 1}, id="refused", trace=flagged, model="none")
            codes = {name: header["code"] for name, (header, _) in client.collect(8).items()}
        spans = receiver.wait(lambda s: len(request_spans(s)) == 6)
        assert codes["a"] == codes["unflagged"] == codes["malformed"] == "ok"

        roots = request_spans(spans)
        assert set(roots) == {"a", "b", "c", "d", "dies", "refused"}
        children: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            children[span.parent_id].append(span)
        for name, root in roots.items():
            assert (root.trace_id, root.parent_id, root.kind) == (TRACE, CALLER, SERVER)
            assert root.attributes["gpupool.code"] == codes[name]
            mine = children[root.span_id]
            assert all(s.trace_id == TRACE and root.start <= s.start <= s.end <= root.end for s in mine)
            assert sum(s.end - s.start for s in mine) <= root.end - root.start
        for name in "abcd":
            root = roots[name]
            assert {s.name for s in children[root.span_id]} - {"attempt"} == STAGES
            assert root.attributes["gpupool.device"] == f"cpu:{root.attributes['gpupool.worker']}"
            assert root.resource["service.name"] == "gpupool"
        died = children[roots["dies"].span_id]
        attempts = [s for s in died if s.name == "attempt"]
        assert attempts[0].attributes["gpupool.reason"] == "crash"
        assert attempts[-1].attributes["gpupool.reason"] == codes["dies"] == "poison"
        assert (roots["dies"].status, roots["refused"].status) == (ERROR, 0)
        assert roots["refused"].attributes["gpupool.code"] == "unknown_model"

        batches = [s for s in spans if s.name == "gpupool.batch"]
        linked = [link for batch in batches for link in batch.links]
        assert sorted(linked) == sorted((TRACE, roots[name].span_id) for name in "abcd")
        assert all(b.trace_id != TRACE and b.attributes["gpupool.close_reason"] for b in batches)
        for batch in batches:
            forwards = [
                s
                for r in roots.values()
                if (r.trace_id, r.span_id) in batch.links
                for s in children[r.span_id]
                if s.name == "forward"
            ]
            assert {(s.start, s.end) for s in forwards} == {(batch.start, batch.end)}

        assert receiver.headers["authorization"] == "Bearer s3cr3t-t0ken"
        assert b"pay104d" not in receiver.raw
        stats = pool.wait(lambda s: s["router"]["traces"]["waiting"] == 0)["router"]["traces"]
        assert stats == {"sent": 6, "dropped": 0, "waiting": 0, "malformed": 1, "unheeded": 0}
        assert any(len(pool.records("request")) == 8 for _ in until(10.0))  # the log has a thread of its own
        records = {r["request_id"]: r for r in pool.records("request")}
        assert {n for n, r in records.items() if r.get("trace_id") == TRACE} == {*roots, "unflagged"}
        assert "s3cr3t" not in pool.text() + json.dumps(pool.status())


def test_a_collector_that_never_answers_costs_no_request(make_pool: MakePool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        endpoint = f"http://127.0.0.1:{black_hole.getsockname()[1]}/v1/traces"
        pool = make_pool(workers=1, config=f'[traces]\nendpoint = "{endpoint}"\nsample = 1.0\n').start()
        black_hole.settimeout(10)
        with pool.client() as client:
            client.call({"i": 0})
            connection, _ = black_hole.accept()  # it is being exported
            with connection:
                names = [client.send({"i": n}) for n in range(300)]
                replies = client.collect(len(names))
                traces: dict[str, Any] = pool.status()["router"]["traces"]
        assert {header["code"] for header, _ in replies.values()} == {"ok"}
        assert (traces["sent"], traces["waiting"] + traces["dropped"]) == (0, 301)
        pool.close()
        assert pool.process is not None
        assert pool.process.returncode == 0
        assert not pool.records("library_log")  # it is told in our own words, and seldom
