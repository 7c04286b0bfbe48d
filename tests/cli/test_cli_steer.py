"""drain, resume, restart-worker and reload: what they ask, how long they wait, how they end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from gpupool.cli import main
from gpupool.exits import Exit
from support.fake_pool import Answer, FakePool, document, ok, refusal, worker


class Story:
    """A pool that takes one order and then shows one status after another, the last one for ever."""

    def __init__(self, order: Answer, *statuses: Answer) -> None:
        self.order = order
        self.statuses = list(statuses)

    def __call__(self, request: dict[str, Any]) -> Answer:
        if request["verb"] != "status":
            return self.order
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


def taken(*workers: dict[str, Any]) -> Answer:
    return ok({"workers": [{key: w[key] for key in ("worker", "incarnation", "state")} for w in workers]})


def shown(*workers: dict[str, Any]) -> Answer:
    return ok(document(*workers))


def run(pool: FakePool, *arguments: str) -> int:
    with mock.patch("gpupool.cli.steer._POLL_S", 0.005):
        return main([*arguments, "--runtime-dir", str(pool.folder)])


def orders(pool: FakePool) -> list[dict[str, Any]]:
    return [request for request in pool.asked if request["verb"] != "status"]


def test_drain_waits_until_the_worker_has_drained(capsys: pytest.CaptureFixture[str]) -> None:
    draining, drained = worker(0, "draining"), worker(0, "drained")
    with FakePool(Story(taken(draining), shown(draining), shown(draining), shown(drained))) as pool:
        assert run(pool, "drain", "0") == Exit.OK

    assert orders(pool) == [{"verb": "drain", "workers": ["0"]}]
    assert len(pool.asked) == 4
    assert capsys.readouterr().out == "worker 0: drained\n"


def test_drain_of_all_names_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(taken(worker(0), worker(1)), shown(worker(0, "drained"), worker(1, "parked")))) as pool:
        assert run(pool, "drain", "--all", "--json") == Exit.OK

    assert orders(pool) == [{"verb": "drain", "workers": None}]
    assert [w["state"] for w in json.loads(capsys.readouterr().out)["workers"]] == ["drained", "parked"]


def test_a_drain_that_takes_too_long_ends_with_four_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    draining = worker(1, "draining")
    with FakePool(Story(taken(draining), shown(draining))) as pool:
        assert run(pool, "drain", "1", "--timeout", "0.05", "--json") == Exit.TIMEOUT

    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["code"] == "timeout"
    assert error["workers"] == [{"worker": 1, "incarnation": 1, "state": "draining"}]
    assert "worker 1; it goes on" in captured.err
    assert len(orders(pool)) == 1


def test_no_wait_returns_with_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(taken(worker(0, "draining")), shown())) as pool:
        assert run(pool, "drain", "0", "--no-wait") == Exit.OK

    assert len(pool.asked) == 1
    assert capsys.readouterr().out == "worker 0: drain ordered\n"


def test_a_drain_that_somebody_undoes_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(taken(worker(0, "draining")), shown(worker(0, "ready")))) as pool:
        assert run(pool, "drain", "0") == Exit.FAILED

    assert "was resumed" in capsys.readouterr().err


def test_an_interrupt_leaves_the_drain_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        FakePool(Story(taken(worker(0, "draining")), shown(worker(0, "draining")))) as pool,
        mock.patch("gpupool.cli.steer.time.sleep", side_effect=KeyboardInterrupt),
    ):
        assert run(pool, "drain", "0", "--json") == 130

    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["code"] == "interrupted"
    assert "the drain goes on" in captured.err
    assert [request["verb"] for request in orders(pool)] == ["drain"]


def test_a_pool_that_goes_away_while_we_wait_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(taken(worker(0, "draining")), shown(worker(0, "draining")), b"")) as pool:
        assert run(pool, "drain", "0") == Exit.UNREACHABLE
    capsys.readouterr()


def test_an_unknown_worker_is_the_pools_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(refusal("unknown_worker", "no worker '9'"), shown())) as pool:
        assert run(pool, "drain", "9", "--json") == Exit.FAILED

    assert json.loads(capsys.readouterr().out)["error"] == {"code": "unknown_worker", "message": "no worker '9'"}


def test_resume_asks_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(taken(worker(0), worker(1, "starting")), shown())) as pool:
        assert run(pool, "resume", "0", "cpu:1") == Exit.OK

    assert pool.asked == [{"verb": "resume", "workers": ["0", "cpu:1"]}]
    assert capsys.readouterr().out == "worker 0: ready\nworker 1: starting\n"


def steps(*states: tuple[str, int]) -> Sequence[Answer]:
    return [shown(worker(0, state, incarnation, last_exit={"code": 70})) for state, incarnation in states]


def test_restart_waits_for_the_next_incarnation_to_be_ready(capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(
        taken(worker(0, "ready", 3)), *steps(("ready", 3), ("draining", 3), ("stopping", 3), ("loading", 4), ("ready", 4))
    )
    with FakePool(story) as pool:
        assert run(pool, "restart-worker", "0", "--json") == Exit.OK

    assert orders(pool) == [{"verb": "restart", "workers": ["0"], "force": False}]
    assert json.loads(capsys.readouterr().out) == {"workers": [{"worker": 0, "incarnation": 4, "state": "ready"}]}


def test_restart_by_force_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(taken(worker(0)), *steps(("ready", 2)))) as pool:
        assert run(pool, "restart-worker", "--all", "--force") == Exit.OK

    assert orders(pool) == [{"verb": "restart", "workers": None, "force": True}]
    capsys.readouterr()


@pytest.mark.parametrize("end", [("backing_off", 2), ("parked", 2), ("loading", 3)])
def test_a_restart_that_fails_to_boot_fails_with_the_last_exit(
    end: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    with FakePool(Story(taken(worker(0)), *steps(("stopping", 1), ("loading", 2), end))) as pool:
        assert run(pool, "restart-worker", "0", "--json") == Exit.FAILED

    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "restart_failed"
    assert "last exit: code 70" in error["message"]


def test_a_restart_waits_for_the_others_before_it_tells_of_one_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    one_failed = shown(worker(0, "parked", 2), worker(1, "loading", 2))
    both_settled = shown(worker(0, "parked", 2), worker(1, "ready", 2))
    with FakePool(Story(taken(worker(0), worker(1)), one_failed, both_settled)) as pool:
        assert run(pool, "restart-worker", "--all", "--json") == Exit.FAILED

    assert json.loads(capsys.readouterr().out)["error"]["workers"][1]["state"] == "ready"
    assert len(pool.asked) == 3


def test_a_restart_that_takes_too_long_ends_with_four(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(taken(worker(0)), *steps(("loading", 2)))) as pool:
        assert run(pool, "restart-worker", "0", "--timeout", "0.05") == Exit.TIMEOUT
    capsys.readouterr()


@pytest.mark.parametrize("order", [{}, {"workers": [{}]}, {"workers": None}])
def test_an_order_whose_answer_names_no_workers_is_told(order: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(ok(order), shown())) as pool:
        assert run(pool, "drain", "0") == Exit.UNREACHABLE
    capsys.readouterr()


def test_reload_tells_what_was_applied_and_what_needs_a_restart(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"config_generation": 2, "applied": ["batching.max_batch"], "needs_restart": []}
    with FakePool(Story(ok(result), shown())) as pool:
        assert run(pool, "reload") == Exit.OK
        assert capsys.readouterr().out == "config generation: 2\napplied: batching.max_batch\nneeds restart: nothing\n"
        assert run(pool, "reload", "--json") == Exit.OK

    assert json.loads(capsys.readouterr().out) == result


def test_a_refused_reload_fails_with_the_pools_words(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(refusal("bad_config", "batching.max_batsh: …"), shown())) as pool:
        assert run(pool, "reload") == Exit.FAILED

    assert "batching.max_batsh" in capsys.readouterr().err


def test_a_reload_that_takes_too_long_ends_with_four(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(Story(None, shown())) as pool, mock.patch("gpupool.cli.steer._RELOAD_TIMEOUT_S", 0.1):
        assert run(pool, "reload", "--json") == Exit.TIMEOUT

    assert json.loads(capsys.readouterr().out)["error"]["code"] == "timeout"
