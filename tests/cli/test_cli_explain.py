"""explain: the life of a request as people read it, where the log is looked for, and what is said when it is not there."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpupool.cli import main
from gpupool.exits import Exit
from support.fake_pool import FakePool, document, steady

RECORDS: list[dict[str, Any]] = [
    {"event": "router_up", "time": 900.0},
    {"event": "worker_spawned", "time": 901.0, "worker": 0, "device": "GPU-a"},
    {"event": "worker_spawned", "time": 901.0, "worker": 1, "device": "GPU-b"},
    {"event": "worker_exited", "level": "error", "time": 999.95, "worker": 0, "cause": "killed by SIGKILL"},
    {
        "event": "request_redispatched", "level": "info", "time": 999.951, "request_id": "a", "client": "c1", "user": "alice", "ticket": 8, "worker": 0,
        "reason": "crash", "pending_ms": 10.0, "held_ms": 41.0,
    },
    {
        "event": "request", "level": "info", "time": 1000.0, "request_id": "a", "client": "c1", "user": "alice", "ticket": 9, "model": "m",
        "worker": 1, "incarnation": 4, "code": "ok", "attempts": 2, "batch_size": 3, "input_bytes": 7, "output_bytes": 8,
        "pending_ms": 19.0, "queue_ms": 1.0, "preprocess_ms": 2.0, "forward_ms": 30.0, "postprocess_ms": 3.0, "total_ms": 100.0,
    },
    {"event": "request", "time": 1001.0, "request_id": "a", "client": "c2", "code": "overloaded", "message": "the queue is full", "input_bytes": 7},
]  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "pool.log"
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in RECORDS))
    return path


def explain(*arguments: str, log: Path | str) -> int:
    return main(["explain", *arguments, "--log", str(log)])


def test_the_stages_both_workers_and_what_happened_are_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("a", log=log) == Exit.OK

    out = capsys.readouterr().out
    newest, older = out.split("\n\nrequest")
    assert "client c2" in newest
    assert "overloaded, never queued: the queue is full" in newest
    assert "client c1, key alice" in older
    assert "ok after 100.000 ms" in older
    assert "worker 1 (GPU-b), incarnation 4; in a batch of 3; 2 attempts" in older
    times = {
        line[2:50].split("  ")[0]: line.partition(" ms")[0].split()[-1] for line in older.splitlines() if " ms" in line[40:]
    }
    assert times["lost there (crash), worker 0 (GPU-a)"] == "41.000"
    assert times["transport and waiting for reply, worker 1 (GPU-b)"[:48]] == "4.000"
    assert "worker 0 (GPU-a)        worker_exited  killed by SIGKILL" in older


def test_json_has_the_parts_and_they_add_up(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("a", "--client", "alice", "--json", log=log) == Exit.OK

    (life,) = json.loads(capsys.readouterr().out)["lives"]
    assert sum(part["ms"] for part in life["parts"]) == pytest.approx(100.0)
    assert life["devices"] == {"0": "GPU-a", "1": "GPU-b"}
    assert [event["event"] for event in life["around"]] == ["worker_exited"]


def test_one_that_is_not_there_is_told_with_how_far_the_log_reaches(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("nope", "--json", log=log) == Exit.FAILED

    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["first_time"], error["last_time"]) == ("not_found", 900.0, 1001.0)
    assert "request_sample" in error["message"]


@pytest.mark.parametrize(("content", "what"), [("", "is empty"), ("12:00 info router request request_id=a\n", "no JSON")])
def test_a_log_that_cannot_have_it_says_why(log: Path, content: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(content)

    assert explain("a", log=log) == Exit.FAILED
    assert what in capsys.readouterr().err


def test_a_log_can_be_piped_in(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes()))):
        assert explain("a", log="-") == Exit.OK
    assert "alice" in capsys.readouterr().out


def pool_with(**more: Any) -> FakePool:
    status = document()
    status["pool"] |= more
    return FakePool(steady(status))


def test_without_a_file_the_running_pools_log_is_read(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pool_with(log_file=str(log), log_unit=None) as pool:
        assert main(["explain", "a", "--runtime-dir", str(pool.folder)]) == Exit.OK
    assert "alice" in capsys.readouterr().out


def test_under_systemd_the_journal_is_read(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "journalctl"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {log}\n')
    program.chmod(0o755)
    with (
        pool_with(log_file=None, log_unit="gpupool@x.service") as pool,
        mock.patch.dict("os.environ", PATH=f"{tmp_path}:/bin:/usr/bin"),
    ):
        assert main(["explain", "a", "--since", "1 hour ago", "--runtime-dir", str(pool.folder)]) == Exit.OK
        asked = (tmp_path / "asked").read_text().strip()
        program.write_text("#!/bin/sh\nexit 4\n")
        assert main(["explain", "a", "--runtime-dir", str(pool.folder)]) == Exit.FAILED

    assert asked == "--quiet --no-pager -u gpupool@x.service -o cat --since 1 hour ago"
    assert "exit code 4" in capsys.readouterr().err


def test_when_the_log_is_out_of_reach_it_says_how_to_pipe_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pool_with(log_file=None, log_unit=None) as pool:
        assert main(["explain", "a", "--runtime-dir", str(pool.folder)]) == Exit.FAILED
    assert main(["explain", "a", "--runtime-dir", str(tmp_path)]) == Exit.UNREACHABLE
    assert capsys.readouterr().err.count("--log -") == 2
