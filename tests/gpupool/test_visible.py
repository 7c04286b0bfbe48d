"""Whatever a client or a model has put into its texts, no command prints a control character."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpupool.cli import main, stacks
from gpupool.cli.event_line import line_of
from gpupool.cli.process_stacks import Stacks
from gpupool.cli.rates import head, rows
from gpupool.cli.top_lines import event_line, pool_lines, worker_line
from gpupool.visible import visible, visible_lines
from support.fake_pool import FakePool, document, ok, refusal, worker

#: Sets a terminal's title and clears it, as C0 and as C1; then DEL, right to left, a line's end.
EVIL = "\x1b]0;PWNED\x07\x1b[2J\x9b2J\x7f\u202e\u2066\u2028\rx"
EVENT: dict[str, Any] = {
    "n": 1, "time": 1.0, "level": "warning", "event": "request_poisoned", "component": "router", "request_id": EVIL, "hash": "ab",
    "reason": EVIL, "stderr": [EVIL], "model": f"{EVIL}\nforged line",
}  # fmt: skip
EVIL_POOL = document(
    worker(0, "parked", reason=EVIL, last_exit={"cause": EVIL}, device={"kind": "cpu", "id": EVIL, "health": EVIL}),
    state=EVIL, bind=[EVIL], replied_total={EVIL: 1},
    poison=[{"hash": EVIL, "model": f"[red]{EVIL}", "input_bytes": 1, "worker_deaths": 2, "age_s": 1.0, "expires_in_s": 1.0, "refused": 1}],
)  # fmt: skip


def harmless(text: str) -> bool:
    return not any(character in text for character in set(EVIL) - set("]0;PWNED[2Jx"))


def test_controls_are_spelled_out_and_all_else_stays() -> None:
    assert visible("\x1b[2J \x85\x7f\u202e\n\t") == r"\x1b[2J \x85\x7f\u202e\n\t"
    assert visible("\ud800") == r"\ud800"
    assert visible_lines("a\tb\n\x1bc\r\n") == "a\tb\n\\x1bc\\r\n"
    assert visible("Grüße, 世界 🙂 שלום \\x1b") == "Grüße, 世界 🙂 שלום \\x1b"
    assert visible(visible(EVIL)) == visible(EVIL)


def test_lines_of_events_workers_and_the_pool_are_harmless_and_remain_one_line() -> None:
    lines = [
        line_of(EVENT), line_of({**EVENT, "event": EVIL, "level": EVIL, "device": EVIL, EVIL: 5}), event_line(EVENT),
        event_line({**EVENT, "event": EVIL, EVIL: 5}), *pool_lines(head(EVIL_POOL, None)), *map(worker_line, rows(EVIL_POOL, None)),
    ]  # fmt: skip
    assert all(map(harmless, lines))
    assert not any("\n" in line for line in lines)
    assert r"request_id=\x1b]0;PWNED\x07" in lines[0]


def look(pid: int, *_: object, **__: object) -> Stacks:
    return Stacks(pid, "signal", f"Thread 1\n  forward {EVIL}", False, EVIL)


def profiled(request: dict[str, Any]) -> dict[str, Any]:
    operator = {"name": EVIL, "calls": 1, "self_ms": 1.0, "total_ms": 1.0, "device_ms": None}
    return {"profiler": EVIL, "batches": 1, "ended": "batches", "file": f"/{EVIL}", "operators": [operator]}


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (["events"], lambda _: {"events": [EVENT], "last": 1}),
        (["status"], None),
        (["stacks", "0"], None),
        (["profile", "0"], profiled),
        (["poison", "list"], None),
        (["reload"], lambda _: {"changed": [EVIL]}),
        (["resume", "0"], lambda _: {"workers": [{"worker": 0, "incarnation": 1, "state": EVIL}]}),
    ],
)
def test_no_command_prints_controls_of_others(
    arguments: list[str],
    result: Callable[[Any], Any] | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks, "stacks_of", look)
    with FakePool(lambda request: ok(EVIL_POOL if result is None or request["verb"] == "status" else result(request))) as pool:
        main([*arguments, "--runtime-dir", str(pool.folder)])
    out, err = capsys.readouterr()
    assert r"\x1b]0;PWNED" in out
    assert harmless(out + err)


def test_explain_shows_no_controls_and_json_has_the_id_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text(
        json.dumps({"event": "request", "time": 1.0, "request_id": "a", "client": EVIL, "code": "failed", "message": EVIL}, separators=(",", ":"))
        + "\n"
    )  # fmt: skip
    main(["explain", "a", "--log", str(log)])
    out = capsys.readouterr().out
    assert r"\x1b]0;PWNED" in out
    assert harmless(out)
    main(["explain", "a", "--log", str(log), "--json"])
    assert json.loads(capsys.readouterr().out)["lives"][0]["request"]["message"] == EVIL


def test_a_refusal_is_told_without_its_controls(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(lambda _: refusal("bad", f"model {EVIL}")) as pool:
        main(["events", "--runtime-dir", str(pool.folder)])
    err = capsys.readouterr().err
    assert r"\x1b]0;PWNED" in err
    assert harmless(err)


def test_only_output_prints() -> None:
    """It makes visible what it prints; a bare print would not."""
    folder = Path(stacks.__file__).parent
    printing = {
        file.name
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == {"output.py"}
