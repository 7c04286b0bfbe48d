"""drill: what it asks, what it prints, how it ends, and that it never harms unasked."""

from __future__ import annotations

import io
import json
from typing import Any
from unittest import mock

import pytest

from gpupool.cli import main
from gpupool.exits import Exit
from support.fake_pool import Answer, FakePool, document, ok, refusal


def report(**more: Any) -> dict[str, Any]:
    return {
        "worker": 0, "incarnation": 3, "kind": "kill", "back": True, "detected_s": 0.004, "redispatched_s": 0.006, "ready_s": 0.6,
        "full_capacity_s": 5.6, "steps_s": {"exited": 0.004}, "replied": {"ok": 120}, "redispatched": 3, "failed": {},
        "state": "ready", "last_exit": {"cause": "drilled: SIGKILL"}, "router_restarted": False, **more,
    }  # fmt: skip


def pool_that_answers(answer: Answer) -> FakePool:
    return FakePool(lambda request: ok(document()) if request["verb"] == "status" else answer)


def run(pool: FakePool, *arguments: str) -> int:
    return main(["drill", *arguments, "--runtime-dir", str(pool.folder)])


def test_a_good_drill_is_told_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(ok(report())) as pool:
        assert run(pool, "kill", "0", "--yes", "--timeout", "20") == Exit.OK

    assert pool.asked[-1] == {"verb": "drill", "worker": "0", "kind": "kill", "force": False, "within_s": 20.0}
    out = capsys.readouterr().out
    for told in ("drilled: SIGKILL", "after 0.004 s", "after 5.600 s", "120 answered, 3 of them run again; failed: none"):
        assert told in out


def test_as_json_it_is_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(ok(report())) as pool:
        assert run(pool, "freeze", "cpu:1", "--yes", "--force", "--json") == Exit.OK

    assert json.loads(capsys.readouterr().out) == report()
    assert (pool.asked[-1]["worker"], pool.asked[-1]["force"]) == ("cpu:1", True)


@pytest.mark.parametrize(
    ("outcome", "code", "exit_code"),
    [
        ({"failed": {"worker_lost": 2}}, "requests_failed", Exit.FAILED),
        ({"back": False, "ready_s": None, "full_capacity_s": None, "state": "parked"}, "timeout", Exit.TIMEOUT),
        ({"back": False, "failed": {"no_workers": 9}, "state": "loading"}, "timeout", Exit.TIMEOUT),
    ],
    ids=["requests failed", "not back", "neither"],
)
def test_a_bad_drill_ends_with_its_code_and_the_report(
    capsys: pytest.CaptureFixture[str], outcome: dict[str, Any], code: str, exit_code: int
) -> None:
    with pool_that_answers(ok(report(**outcome))) as pool:
        assert run(pool, "kill", "0", "--yes", "--json") == exit_code
        error = json.loads(capsys.readouterr().out)["error"]
        assert run(pool, "kill", "0", "--yes") == exit_code

    assert error["code"] == code
    assert error["report"] == report(**outcome)
    assert "failed:" in capsys.readouterr().out


def test_without_a_terminal_it_wants_yes(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(ok(report())) as pool:
        assert run(pool, "kill", "0", "--json") == Exit.USAGE

    assert pool.asked == []
    assert "--yes" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(("said", "exit_code", "drilled"), [("y\n", Exit.OK, True), ("n\n", Exit.FAILED, False)])
def test_on_a_terminal_it_asks(capsys: pytest.CaptureFixture[str], said: str, exit_code: int, drilled: bool) -> None:
    terminal = io.StringIO(said)
    with pool_that_answers(ok(report())) as pool:
        with mock.patch("sys.stdin", terminal), mock.patch.object(terminal, "isatty", return_value=True):
            assert run(pool, "hang", "0") == exit_code

    assert any(request["verb"] == "drill" for request in pool.asked) == drilled
    assert "its next batch never end" in capsys.readouterr().err


def test_a_refusal_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(refusal("refused", "worker 0 is draining")) as pool:
        assert run(pool, "kill", "0", "--yes") == Exit.FAILED

    assert "worker 0 is draining" in capsys.readouterr().err


def test_a_pool_that_stays_silent_is_not_waited_for_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(None) as pool, mock.patch("gpupool.cli.drill._ANSWER_S", 0.1):
        assert run(pool, "kill", "0", "--yes", "--timeout", "0.1") == Exit.TIMEOUT


@pytest.mark.parametrize("answer", [ok({}), ok(None), ok(report(failed=None))], ids=["empty", "null", "no codes"])
def test_an_answer_that_is_no_report_is_told(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(answer) as pool:
        assert run(pool, "kill", "0", "--yes") == Exit.UNREACHABLE

    assert "no drill report" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["melt", "0", "--yes"], ["kill", "--yes"], ["kill", "0", "--yes", "--timeout", "0"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(ok(report())) as pool:
        assert run(pool, *arguments) == Exit.USAGE

    assert pool.asked == []
