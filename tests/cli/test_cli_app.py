"""The program as a whole: usage, help, what it imports, and one JSON value on stdout however it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import gpupool
from gpupool.cli import main
from gpupool.cli.app import wants_json
from gpupool.exits import Exit
from support.fake_pool import FakePool, document, ok, refusal, steady

COMMANDS = [
    "serve",
    "check-config",
    "status",
    "drain",
    "resume",
    "restart-worker",
    "release-device",
    "reload",
    "call",
    "demo",
    "events",
    "explain",
]
#: What a quick command must not pay for. (pydantic is not among it: typer checks arguments with it.)
HEAVY = {"torch", "numpy", "structlog", "zmq", "uvloop", "msgpack", "orjson", "rich", "gpupool.config", "gpupool.client"}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        os.environ.pop("GPUPOOL_RUNTIME_DIR", None)
        yield


def loaded_after(*arguments: str) -> tuple[int, set[str]]:
    """Run a command in a fresh interpreter; its exit code and which heavy modules it imported."""
    code = f"import sys; from gpupool.cli import main; c = main({list(arguments)!r}); sys.stderr.write('|'.join(sys.modules)); sys.exit(c)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, set(done.stderr.split("|")) & HEAVY


@pytest.mark.processes
def test_help_and_status_import_nothing_heavy() -> None:
    with FakePool(steady(document())) as pool:
        assert loaded_after("--help") == (0, set())
        assert loaded_after("status", "--help") == (0, set())
        assert loaded_after("status", "--json", "--runtime-dir", str(pool.folder)) == (0, set())
        code, loaded = loaded_after("status", "--runtime-dir", str(pool.folder))
    assert (code, loaded) == (0, {"rich"})


@pytest.mark.processes
def test_the_program_is_the_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpupool", "--version"], capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout == f"gpupool {gpupool.__version__}\n"


@pytest.mark.processes
def test_an_early_end_of_the_reader_is_no_traceback() -> None:
    with FakePool(steady(document())) as pool:
        command = [sys.executable, "-m", "gpupool", "status", "--json", "--runtime-dir", str(pool.folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        assert process.wait(30) in (0, Exit.FAILED)
    assert b"Traceback" not in errors


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0

    out = capsys.readouterr().out
    assert f"Usage: gpupool {command}" in out
    assert "\x1b" not in out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in COMMANDS)


WRONG_USAGE: dict[str, list[str]] = {
    "no command": [],
    "unknown command": ["statsu"],
    "unknown option": ["status", "--jsn"],
    "option without value": ["status", "--runtime-dir"],
    "too many arguments": ["status", "now"],
    "no worker": ["drain"],
    "worker and all": ["drain", "0", "--all"],
    "no worker to resume": ["resume"],
    "no worker to restart": ["restart-worker"],
    "time that is none": ["drain", "0", "--timeout", "soon"],
    "no time": ["drain", "0", "--timeout", "0"],
    "infinite time": ["call", "1", "--timeout", "inf"],
    "time nan": ["call", "1", "--timeout", "nan"],
    "no configuration": ["serve"],
    "no file": ["check-config"],
    "no such demo file": ["demo", "/no/such/file"],
    "no demo workers": ["demo", "--workers", "0"],
    "no request": ["explain"],
    "a level that is none": ["events", "--level", "loud"],
}


@pytest.mark.parametrize("arguments", WRONG_USAGE.values(), ids=WRONG_USAGE.keys())
def test_wrong_usage_ends_with_two_and_a_word_on_stderr(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == Exit.USAGE

    captured = capsys.readouterr()
    assert captured.err.startswith("gpupool: ")
    assert captured.out == "" or arguments[0] == "call"


@pytest.mark.parametrize("arguments", WRONG_USAGE.values(), ids=WRONG_USAGE.keys())
def test_wrong_usage_with_json_is_one_json_value(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[-1:] == ["--runtime-dir"]:
        arguments = ["status", "--json", "--runtime-dir"]
    assert main([*arguments, "--json"] if "--json" not in arguments else arguments) == Exit.USAGE

    assert one_value(capsys)["error"]["code"] == "usage"


def one_value(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """stdout as the one JSON value that it must be."""
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    value = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert isinstance(value, dict)
    return value


#: Commands that ask the pool, each with what it needs.
ASKING = [
    ["status"],
    ["drain", "0"],
    ["resume", "--all"],
    ["restart-worker", "0"],
    ["reload"],
    ["call", "{}"],
]
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], int, str]] = {
    "garbage": (lambda _: b"garbage\n", Exit.UNREACHABLE, "bad_answer"),
    "hang-up": (lambda _: b"", Exit.UNREACHABLE, "bad_answer"),
    "refusal": (lambda _: refusal("permission_denied", "not you"), Exit.FAILED, "permission_denied"),
    "odd result": (steady("fine"), Exit.UNREACHABLE, "bad_answer"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arguments", ASKING, ids=[a[0] for a in ASKING])
def test_stdout_is_one_json_value_in_every_failure(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reply, exit_code, code = FAULTS[fault]
    with FakePool(reply) as pool:
        assert main([*arguments, "--json", "--runtime-dir", str(pool.folder)]) == exit_code

    error = one_value(capsys)["error"]
    assert error["code"] == code
    assert error["message"]


@pytest.mark.parametrize("arguments", ASKING, ids=[a[0] for a in ASKING])
def test_without_a_pool_every_command_ends_with_three(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--runtime-dir", str(tmp_path)]) == Exit.UNREACHABLE

    assert str(tmp_path / "control.sock") in capsys.readouterr().err


def test_the_environment_names_the_pool_and_the_flag_goes_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(steady(document())) as pool:
        os.environ["GPUPOOL_RUNTIME_DIR"] = str(pool.folder)
        assert main(["status"]) == Exit.OK
        assert main(["status", "--runtime-dir", str(tmp_path)]) == Exit.UNREACHABLE
    capsys.readouterr()


def test_a_bug_is_one_json_value_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupool.cli.status.verdict", lambda _: 1 // 0)
    with FakePool(steady(document())) as pool:
        assert main(["status", "--json", "--runtime-dir", str(pool.folder)]) == Exit.FAILED

    assert "ZeroDivisionError" in capsys.readouterr().err


def test_interrupting_an_answer_ends_as_shells_expect(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        FakePool(lambda _: ok(document())) as pool,
        mock.patch("gpupool.cli.status.status_of", side_effect=KeyboardInterrupt),
    ):
        assert main(["status", "--runtime-dir", str(pool.folder)]) == 130
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["status", "--json"], True),
        (["status"], False),
        (["call", "1"], True),
        (["drain", "--", "--json"], False),
        ([], False),
    ],
)
def test_whether_json_is_wanted_is_known_before_parsing(arguments: list[str], expected: bool) -> None:
    assert wants_json(arguments) is expected
