"""`gpupool call`: where it goes, what it prints, how each error ends."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any, Self

import pytest

from gpupool.cli import main
from gpupool.cli.call import reachable
from gpupool.cli.output import plain
from gpupool.errors import DeadlineExceeded, GpuPoolError, InvalidInput, Overloaded
from gpupool.exits import Exit
from support.fake_pool import FakePool, document, steady

REPLY = SimpleNamespace(result=[0.5], model="m", version="2", worker=1, attempts=1, timings_ms={"total": 1.5})


class FakeClient:
    """Stands in for the client: a test says how requests end."""

    calls: list[tuple[str, Any, str | None]]
    outcome: GpuPoolError | SimpleNamespace = REPLY
    answers_pings = True

    def __init__(self, endpoint: str, *, timeout: float) -> None:
        self.endpoint = endpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ping(self, *, timeout: float) -> float:
        if not self.answers_pings:
            raise DeadlineExceeded("nobody answers")
        return 0.001

    def infer(self, sample: Any, *, model: str | None, timeout: float) -> Any:
        assert 0 < timeout <= 30
        self.calls.append((self.endpoint, sample, model))
        if isinstance(self.outcome, GpuPoolError):
            raise self.outcome
        return self.outcome


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    fresh: type[FakeClient] = type("Fresh", (FakeClient,), {"calls": []})
    monkeypatch.setattr("gpupool.client.Client", fresh)
    return fresh


def run(*arguments: str, **router: Any) -> int:
    with FakePool(steady(document(**router))) as pool:
        return main(["call", *arguments, "--runtime-dir", str(pool.folder)])


def test_a_reply_is_printed_as_one_json_value(client: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    assert run('{"text": "hi"}', "--model", "m") == Exit.OK

    assert client.calls == [("tcp://127.0.0.1:1", {"text": "hi"}, "m")]
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == vars(REPLY)


def test_a_sample_may_come_from_stdin(
    client: type[FakeClient], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in ([], ["-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2]\n"))
        assert run(*arguments) == Exit.OK

    assert [sample for _, sample, _ in client.calls] == [[1, 2], [1, 2]]
    capsys.readouterr()


def test_an_endpoint_given_needs_no_pool(client: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["call", "1", "--endpoint", "tcp://gpu7:5555", "--runtime-dir", "/nowhere"]) == Exit.OK

    assert client.calls[0][0] == "tcp://gpu7:5555"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ("tcp://0.0.0.0:5555", "tcp://127.0.0.1:5555"),
        ("tcp://*:5555", "tcp://127.0.0.1:5555"),
        ("tcp://10.0.0.7:5555", "tcp://10.0.0.7:5555"),
        ("ipc:///run/x.sock", "ipc:///run/x.sock"),
    ],
)
def test_an_address_bound_becomes_one_to_go_to(bound: str, expected: str) -> None:
    assert reachable(bound) == expected


ENDS: dict[str, tuple[GpuPoolError, int, dict[str, Any]]] = {
    "input": (InvalidInput("text: missing", field="text"), Exit.FAILED, {"retryable": False, "field": "text"}),
    "overload": (Overloaded("full", retry_after_ms=20), Exit.FAILED, {"retryable": True, "retry_after_ms": 20}),
    "time-out": (DeadlineExceeded("late"), Exit.TIMEOUT, {"retryable": True}),
}


@pytest.mark.parametrize(("error", "exit_code", "details"), ENDS.values(), ids=ENDS.keys())
def test_an_error_of_the_pool_is_one_json_value(
    client: type[FakeClient],
    capsys: pytest.CaptureFixture[str],
    error: GpuPoolError,
    exit_code: int,
    details: dict[str, Any],
) -> None:
    client.outcome = error

    assert run("{}") == exit_code

    assert json.loads(capsys.readouterr().out)["error"] == {"code": error.code, "message": error.message, **details}


def test_a_router_that_does_not_answer_is_unreachable(client: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    client.answers_pings = False

    assert run("{}") == Exit.UNREACHABLE

    assert "tcp://127.0.0.1:1" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert client.calls == []


def test_the_real_client_finds_nobody(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupool.cli.call._PING_TIMEOUT_S", 0.2)

    assert main(["call", "{}", "--endpoint", "tcp://127.0.0.1:1"]) == Exit.UNREACHABLE

    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unreachable"


def test_an_endpoint_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["call", "{}", "--endpoint", "nonsense"]) == Exit.USAGE

    assert "nonsense" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_router_that_is_not_up_is_told(client: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("{}", bind=[]) == Exit.FAILED

    assert json.loads(capsys.readouterr().out)["error"]["code"] == "no_router"


@pytest.mark.parametrize("text", ["", "{", "nope", "NaN", "[1e999]", "'x'", "[" * 100_000])
def test_what_is_no_json_is_wrong_usage_before_anything_is_asked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["call", text, "--runtime-dir", "/nowhere"]) == Exit.USAGE

    assert json.loads(capsys.readouterr().out)["error"]["code"] == "bad_json"


class Array:
    """What numpy's arrays and torch's tensors have in common."""

    def tolist(self) -> list[float]:
        return [1.0, float("nan"), float("-inf")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Array(), [1.0, None, None]),
        ({"a": (1, b"\x00\xff"), 2: {3}}, {"a": [1, "AP8="], "2": [3]}),
        (bytearray(b"a"), "YQ=="),
        (float("inf"), None),
        (True, True),
        (None, None),
        (1 + 2j, "(1+2j)"),
    ],
)
def test_whatever_a_model_returns_becomes_json(value: object, expected: object) -> None:
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)
