"""profile: what it asks, what it prints, where the copy goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpupool.cli import main
from gpupool.exits import Exit
from support.fake_pool import Answer, FakePool, document, ok, refusal


def pool_that_answers(answer: Answer) -> FakePool:
    return FakePool(lambda request: ok(document()) if request["verb"] == "status" else answer)


def answer(file: Path | None, **more: Any) -> dict[str, Any]:
    row = {"name": "aten::mm", "calls": 40, "self_ms": 12.5, "total_ms": 14.0, "device_ms": None}
    return {
        "worker": 0, "profiler": "torch", "batches": 4, "ended": "batches", "file": None if file is None else str(file),
        "operators": [row], **more,
    }  # fmt: skip


def run(pool: FakePool, *arguments: str) -> int:
    return main(["profile", *arguments, "--runtime-dir", str(pool.folder)])


def test_it_asks_for_batches_and_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pool_that_answers(ok(answer(tmp_path / "p.json.gz"))) as pool:
        assert run(pool, "cpu:1", "--batches", "4", "--seconds", "3") == Exit.OK

    assert pool.asked[-1] == {"verb": "profile", "worker": "cpu:1", "batches": 4, "seconds": 3.0, "within_s": 120.0}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 batches, by torch's profiler"
    assert lines[2].split() == ["calls", "self", "ms", "total", "ms"]
    assert lines[3].split() == ["aten::mm", "40", "12.500", "14.000"]
    assert lines[-1] == str(tmp_path / "p.json.gz")


def test_on_a_card_the_cards_time_has_its_column(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = {"name": "x" * 200, "calls": 1, "self_ms": 1.0, "total_ms": 1.0, "device_ms": 7.25}
    with pool_that_answers(ok(answer(tmp_path / "p", operators=[row]))) as pool:
        assert run(pool, "0") == Exit.OK

    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("device ms")
    assert lines[3].split()[-1] == "7.250"
    assert max(map(len, lines[:4])) <= 128


@pytest.mark.parametrize(
    ("ended", "words"), [("time", "4 batches of 9, then the time was up"), ("memory", "too much of the worker's")]
)
def test_an_early_end_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path, ended: str, words: str) -> None:
    with pool_that_answers(ok(answer(tmp_path / "p", ended=ended))) as pool:
        assert run(pool, "0", "--batches", "9") == Exit.OK

    assert words in capsys.readouterr().out


def test_without_a_batch_there_is_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(ok(answer(None, batches=0, ended="time", operators=[]))) as pool:
        assert run(pool, "0", "--seconds", "2") == Exit.FAILED

    assert "ran no batch within 2 s" in capsys.readouterr().err


def test_the_file_is_copied_to_where_the_shell_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text("trace")
    with pool_that_answers(ok(answer(file))) as pool:
        assert run(pool, "0", "--out", str(tmp_path / "no" / "mine")) == Exit.USAGE
        assert pool.asked == []
        assert run(pool, "0", "--out", str(tmp_path / "mine"), "--json") == Exit.OK

    assert json.loads(capsys.readouterr().out.splitlines()[-1])["file"] == str(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "trace"


def test_too_many_batches_are_refused_here_already(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "0", "--batches", "1001"]) == Exit.USAGE
    assert "1000" in capsys.readouterr().err


def test_a_refusal_of_the_pool_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(refusal("profile_failed", "worker 0: another profile is being taken")) as pool:
        assert run(pool, "0") == Exit.FAILED
    assert "another profile" in capsys.readouterr().err


def test_an_answer_of_another_version_is_no_success() -> None:
    with pool_that_answers(ok({"worker": 0})) as pool:
        assert run(pool, "0") == Exit.UNREACHABLE
