"""events: what it asks, how it prints, and what it reads when no pool answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from gpupool.cli import main
from gpupool.cli.event_line import line_of
from gpupool.cli.events import seconds
from gpupool.exits import Exit
from support.fake_pool import Answer, FakePool, ok, refusal, steady

EXIT: dict[str, Any] = {
    "n": 7, "time": 1000.0, "level": "error", "component": "supervisor", "pid": 1, "worker": 1, "incarnation": 3,
    "cause": "killed by SIGKILL", "code": None, "signal": "SIGKILL", "stderr": ["first", "last words"], "device": "GPU-b",
    "event": "worker_exited",
}  # fmt: skip


def answer(*events: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"events": list(events), "last": 7, "dropped": 0, "file": "/f", **more}


def test_a_line_says_when_how_grave_which_card_what_and_why() -> None:
    line = line_of(EXIT)

    assert line[23:] == (
        '  error    worker 1 (GPU-b)        worker_exited  killed by SIGKILL; incarnation=3 signal=SIGKILL stderr="last words"'
    )


def test_of_several_workers_each_is_named_with_its_card() -> None:
    event = {
        "event": "asked",
        "level": "info",
        "time": 1.0,
        "workers": [0, 1],
        "devices": ["GPU-a", "GPU-b"],
        "verb": "drain",
        "uid": 5,
    }

    assert line_of(event)[23:] == "  info     worker 0 (GPU-a), worker 1 (GPU-b)  asked  verb=drain uid=5"


@pytest.mark.parametrize(
    "event", [{}, {"event": 5, "time": "x", "workers": "x", "reason": {"a": [1]}}, {"worker": {}, "level": None}]
)
def test_a_strange_event_still_makes_a_line(event: dict[str, Any]) -> None:
    assert line_of(event)


def test_it_asks_for_what_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(steady(answer(EXIT, dropped=3))) as pool:
        folder = ["--runtime-dir", str(pool.folder)]
        assert main(["events", "-n", "5", "--worker", "1", "--level", "warning", "--since", "10m", *folder]) == Exit.OK
        printed = capsys.readouterr()
        assert main(["events", "--json", *folder]) == Exit.OK

    assert [{k: v for k, v in asked.items() if k != "verb"} for asked in pool.asked] == [
        {"limit": 5, "worker": "1", "level": "warning", "since_s": 600.0},
        {"limit": 50, "worker": None, "level": "info", "since_s": None},
    ]
    assert printed.out.count("\n") == 1
    assert "worker 1 (GPU-b)" in printed.out
    assert "3 events could not be written to /f" in printed.err
    assert json.loads(capsys.readouterr().out) == {**answer(EXIT, dropped=3), "running": True}


def test_a_refusal_is_no_reason_to_look_elsewhere() -> None:
    with FakePool(lambda _: refusal("unknown_worker", "no worker '9'")) as pool:
        assert main(["events", "--worker", "9", "--runtime-dir", str(pool.folder)]) == Exit.FAILED


def test_of_a_pool_that_is_down_the_file_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.events.jsonl"
    assert main(["events", "--runtime-dir", str(tmp_path)]) == Exit.UNREACHABLE
    assert "left no events" in capsys.readouterr().err
    late = {**EXIT, "n": 8, "time": time.time(), "worker": 0, "device": "GPU-a"}
    path.write_text("".join(json.dumps(event) + "\n" for event in (EXIT, late)) + '{"n": 9, "ev')

    assert main(["events", "--runtime-dir", str(tmp_path)]) == Exit.OK
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 2
    assert str(path) in printed.err
    for only in (["--since", "1h"], ["--worker", "GPU-a"], ["-n", "1"]):
        assert main(["events", "--json", *only, "--runtime-dir", str(tmp_path)]) == Exit.OK
        found = json.loads(capsys.readouterr().out)
        assert [event["n"] for event in found["events"]] == [8]
        assert (found["last"], found["running"]) == (8, False)


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90.0), ("1.5s", 1.5), ("10m", 600.0), ("3h", 10800.0), ("2d", 172800.0), (None, None)]
)
def test_times_are_read(text: str | None, value: float | None) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "m", "-5m", "1w", "nan", "1e9", "5 m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="10m"):
        seconds(text)


@pytest.mark.parametrize("option", [["--level", "loud"], ["-n", "0"], ["-n", "5000"], ["--since", "soon"]])
def test_wrong_usage(option: list[str]) -> None:
    assert main(["events", *option]) == Exit.USAGE


def test_following_asks_for_what_is_new_and_waits_for_a_pool_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [answer(EXIT), answer({**EXIT, "n": 8}, last=8), b"", answer({**EXIT, "n": 9}, last=9)]
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if not answers:
            raise KeyboardInterrupt

    def reply(_: dict[str, Any]) -> Answer:
        found = answers.pop(0)
        return found if isinstance(found, bytes) else ok(found)

    with FakePool(reply) as pool, mock.patch("gpupool.cli.events.time.sleep", nap):
        assert main(["events", "--follow", "--json", "--since", "1h", "--runtime-dir", str(pool.folder)]) == Exit.OK

    printed = capsys.readouterr()
    assert [json.loads(line)["n"] for line in printed.out.splitlines()] == [7, 8, 9]
    assert [(asked.get("after"), asked["since_s"]) for asked in pool.asked] == [(None, 3600.0), (7, None), (8, None), (8, None)]
    assert printed.err.count("waiting for it") == 1
    assert len(naps) == 4
