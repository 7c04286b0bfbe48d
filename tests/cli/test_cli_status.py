"""`gpupool status`: a verdict as exit code, the document for programs, a table for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from gpupool.cli import main
from gpupool.exits import Exit
from support.fake_pool import Answer, FakePool, document, ok, steady, worker


@pytest.mark.parametrize(
    ("ready", "degraded", "expected"),
    [(True, False, Exit.OK), (True, True, Exit.DEGRADED), (False, False, Exit.NOT_READY), (False, True, Exit.NOT_READY)],
)
def test_the_exit_code_is_the_verdict(ready: bool, degraded: bool, expected: Exit, capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(steady(document(ready=ready, degraded=degraded))) as pool:
        assert main(["status", "--runtime-dir", str(pool.folder)]) == expected
        assert main(["status", "--json", "--runtime-dir", str(pool.folder)]) == expected

    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pool"]["degraded"] is degraded


def test_json_is_the_pools_document_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    expected = document(worker(0, memory={"rss_bytes": 5}), later=[1, "ü"])
    with FakePool(steady(expected)) as pool:
        main(["status", "--json", "--runtime-dir", str(pool.folder)])

    assert json.loads(capsys.readouterr().out) == expected


def test_the_table_has_a_line_for_pool_and_router_and_one_for_each_worker(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = {"kind": "gpu", "id": "GPU-01234567-89ab-cdef-0123-456789abcdef", "name": "[H200]", "health": "degraded"}
    dead = worker(
        1, "backing_off", device=gpu, pid=None, heartbeat_age_ms=None, last_exit={"code": 70, "cause": "exit code 70"}
    )
    with FakePool(steady(document(worker(0, running=3), dead, pending=4))) as pool:
        main(["status", "--runtime-dir", str(pool.folder)])

    out = capsys.readouterr().out
    pool_line, router_line, heading, first, second = out.splitlines()
    assert pool_line.startswith("pool p: ready;") and "up 1 h 1 min" in pool_line
    assert "pending 4" in router_line and "ok 7" in router_line
    assert heading.split()[:4] == ["worker", "state", "pid", "device"]
    assert first.split()[:8] == ["0", "ready", "4000", "cpu:0", "ok", "0", "3", "0"]
    assert second.split()[:5] == ["1", "backing_off", "-", gpu["id"], "degraded"]
    assert second.rstrip().endswith("exit code 70")
    assert "\x1b" not in out


def test_the_table_takes_a_pool_that_says_little(capsys: pytest.CaptureFixture[str]) -> None:
    bare: dict[str, Any] = {"pool": {"ready": False, "degraded": False}, "workers": [{"worker": 0, "state": "odd"}]}
    with FakePool(steady(bare)) as pool:
        assert main(["status", "--runtime-dir", str(pool.folder)]) == Exit.NOT_READY

    assert "odd" in capsys.readouterr().out


def test_a_refused_reload_shows(capsys: pytest.CaptureFixture[str]) -> None:
    shown = document()
    shown["pool"]["last_reload_error"] = "batching.max_batsh: …"
    with FakePool(steady(shown)) as pool:
        main(["status", "--runtime-dir", str(pool.folder)])

    assert "last reload refused: batching.max_batsh" in capsys.readouterr().out


def test_a_fluentd_that_takes_nothing_shows(capsys: pytest.CaptureFixture[str]) -> None:
    def log(*, up: bool, waiting: int = 0, dropped: int = 0) -> dict[str, Any]:
        return {"losses": {}, "forwarding": {"address": "10.0.0.9:24224", "up": up, "waiting": waiting, "dropped": dropped}}

    shown = document(worker(0, "ready", log=log(up=False, waiting=3)), worker(1, "ready", log=log(up=True)))
    shown["router"]["log"] = log(up=False, waiting=40, dropped=2)
    shown["logs"] = {"asked": [], "supervisor": log(up=True)}
    with FakePool(steady(shown)) as pool:
        main(["status", "--runtime-dir", str(pool.folder)])

    line = "log: Fluentd at 10.0.0.9:24224 takes nothing from router, worker 0; 43 records wait, 2 lost"
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("terminal", [False, True])
def test_watching_shows_one_status_after_another_until_interrupted(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = iter([document(worker(0, "loading"), ready=False), document(worker(0, "ready"))])
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with (
        FakePool(lambda _: ok(next(documents))) as pool,
        mock.patch("gpupool.cli.status.time.sleep", side_effect=[None, KeyboardInterrupt]),
    ):
        assert main(["status", "--watch", "--runtime-dir", str(pool.folder)]) == Exit.OK

    out = capsys.readouterr().out
    assert out.index("loading") < out.rindex("ready")


def test_watching_with_json_prints_a_value_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        FakePool(steady(document())) as pool,
        mock.patch("gpupool.cli.status.time.sleep", side_effect=[None, None, KeyboardInterrupt]),
    ):
        assert main(["status", "--watch", "--json", "--runtime-dir", str(pool.folder)]) == Exit.OK

    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [document()] * 3


def test_watching_ends_when_the_pool_does(capsys: pytest.CaptureFixture[str]) -> None:
    answers: Iterator[Answer] = iter([ok(document()), b""])
    with FakePool(lambda _: next(answers)) as pool, mock.patch("gpupool.cli.status.time.sleep"):
        assert main(["status", "--watch", "--runtime-dir", str(pool.folder)]) == Exit.UNREACHABLE
    capsys.readouterr()


def test_the_table_says_why_a_worker_does_not_work() -> None:
    from gpupool.cli.status import _why

    worker = {
        "reason": "XID 79: fell off the bus", "device": {"needs": "power_cycle"}, "last_exit": {"cause": "XID 79: fell off the bus"},
    }  # fmt: skip
    assert _why(worker) == "XID 79: fell off the bus; needs power_cycle"
    assert _why({"device": {}, "late": True, "last_exit": {"cause": "killed by SIGKILL"}}) == (
        "its beat is missing; last exit: killed by SIGKILL"
    )
    assert _why({"oom_total": 2, "leak": {"host": {"suspected": True}, "device": {"suspected": False}}}) == (
        "ran out of memory 2 times; its host memory rises: a leak?"
    )
    assert _why({"oom_total": 0, "leak": {}}) == "-"
    assert _why({}) == "-"


def test_the_table_says_what_the_log_has_lost() -> None:
    from gpupool.cli.status import _log_lines

    told = {"logs": {"supervisor": {"losses": {}}}, "router": {"log": {"losses": {"info": 12, "error": 1}}}, "workers": []}
    assert _log_lines(told) == ["log: router lost 12 info, 1 error: nowhere to write"]
