"""serve and check-config: one verdict, told as log lines by one and as text or JSON by the other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpupool.cli import main
from gpupool.config import Config
from gpupool.exits import Exit
from gpupool.supervisor.devices import Inventory

GOOD = '[pool]\ndevices = "cpu:2"\n[[model]]\nname = "m"\nhandler = "toys:Echo"\n'
BAD = "[batching]\nmax_batsh = 8\nwindow_ms = -1\n" + GOOD


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        os.environ.pop("GPUPOOL_RUNTIME_DIR", None)
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that serve would have run."""
    configs: list[Config] = []

    def run(config: Config) -> int:
        configs.append(config)
        return 75

    monkeypatch.setattr("gpupool.supervisor.main.run", run)
    return configs


def written(folder: Path, text: str) -> str:
    (folder / "toys.py").write_text("class Echo: ...\n")
    (folder / "pool.toml").write_text(text)
    return str(folder / "pool.toml")


def test_serve_runs_a_good_configuration_and_ends_with_its_code(tmp_path: Path, ran: list[Config]) -> None:
    assert main(["serve", "-c", written(tmp_path, GOOD)]) == 75

    assert [config.pool.devices for config in ran] == ["cpu:2"]


def test_the_runtime_directory_of_the_flag_holds_for_reloads_and_children(tmp_path: Path, ran: list[Config]) -> None:
    main(["serve", "--config", written(tmp_path, GOOD), "--runtime-dir", "/run/other"])

    assert ran[0].pool.runtime_dir == "/run/other"
    assert os.environ["GPUPOOL_RUNTIME_DIR"] == "/run/other"


def test_serve_tells_each_mistake_in_a_line_of_the_log(
    tmp_path: Path, ran: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "-c", written(tmp_path, BAD)]) == Exit.BAD_CONFIG

    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines()]
    assert captured.out == ""
    assert ran == []
    assert [line["path"] for line in lines] == ["batching.max_batsh", "batching.window_ms"] or len(lines) == 2
    for line in lines:
        assert line["event"] == "config_error" and line["level"] == "error" and line["component"] == "supervisor"
        assert isinstance(line["time"], float) and line["timestamp"].endswith("+00:00") and line["pid"] == os.getpid()
    misspelt = next(line for line in lines if line["path"] == "batching.max_batsh")
    assert "max_batsh" in misspelt["message"] and "max_batch" in misspelt["hint"]


def test_check_config_gives_the_same_verdict_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", written(tmp_path, BAD)]) == Exit.BAD_CONFIG

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 mistakes" in captured.err
    assert 'max_batsh"; did you mean "max_batch"?' in captured.err


def test_check_config_gives_the_same_verdict_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", written(tmp_path, BAD), "--json"]) == Exit.BAD_CONFIG

    error: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "bad_config"
    assert {e["path"] for e in error["errors"]} == {"batching.max_batsh", "batching.window_ms"}
    assert all(set(e) == {"path", "expected", "found", "hint"} for e in error["errors"])


def test_check_config_accepts_a_good_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, GOOD)

    assert main(["check-config", file]) == Exit.OK
    assert capsys.readouterr().out == f"{file}: good; models: m 1\n"
    assert main(["check-config", file, "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out) == {"ok": True, "file": file, "models": [{"name": "m", "version": "1"}]}


def test_check_config_refuses_devices_that_this_host_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpupool.supervisor.devices.inventory", lambda: Inventory([], "no driver", absent=True, silent=0))

    assert main(["check-config", written(tmp_path, GOOD.replace('"cpu:2"', "[0, 1]"))]) == Exit.BAD_CONFIG

    assert "pool.devices" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", "-c"], ["check-config"]])
def test_a_file_that_is_not_there_is_a_refused_configuration(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path / "none.toml")]) == Exit.BAD_CONFIG

    assert "No such file" in capsys.readouterr().err


def test_demo_gets_its_file_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def run_demo(file: Path | None, *, json_output: bool, workers: int | None) -> int:
        asked.append((file, json_output, workers))
        return 0

    monkeypatch.setitem(__import__("sys").modules, "gpupool.demo", mock.Mock(run_demo=run_demo))
    (tmp_path / "text").write_text("hello\n")

    assert main(["demo", str(tmp_path / "text"), "--workers", "2", "--json"]) == 0
    assert main(["demo"]) == 0
    assert asked == [(tmp_path / "text", True, 2), (None, False, None)]
