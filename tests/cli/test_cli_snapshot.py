"""snapshot: what it asks, what it prints, where the copy goes."""

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


def answer(*files: Path) -> dict[str, Any]:
    return {
        "worker": 0, "files": [str(f) for f in files], "allocated_and_held_bytes": 3 << 20, "places": 12, "between_batches": True,
    }  # fmt: skip


def run(pool: FakePool, *arguments: str) -> int:
    return main(["snapshot", *arguments, "--runtime-dir", str(pool.folder)])


def test_it_asks_for_one_worker_and_says_where_the_file_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pool_that_answers(ok(answer(tmp_path / "s.json"))) as pool:
        assert run(pool, "cpu:1", "--seconds", "3") == Exit.OK

    assert pool.asked[-1] == {"verb": "snapshot", "worker": "cpu:1", "seconds": 3.0, "within_s": 120.0}
    assert capsys.readouterr().out == f"3.0 MiB allocated in 3 s and still held, at 12 places\n{tmp_path / 's.json'}\n"


def test_the_files_are_copied_to_where_the_shell_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [tmp_path / "s.json", tmp_path / "s.json.pickle"]
    for file in files:
        file.write_text(file.name)
    with pool_that_answers(ok(answer(*files))) as pool:
        assert run(pool, "0", "--out", str(tmp_path / "mine"), "--json") == Exit.OK

    assert json.loads(capsys.readouterr().out)["files"] == [str(tmp_path / "mine"), str(tmp_path / "mine.pickle")]
    assert (tmp_path / "mine").read_text() == "s.json"
    assert (tmp_path / "mine.pickle").read_text() == "s.json.pickle"


def test_a_folder_that_is_not_there_is_told_before_anything_is_traced(tmp_path: Path) -> None:
    with pool_that_answers(ok(answer())) as pool:
        assert run(pool, "0", "--out", str(tmp_path / "no" / "mine")) == Exit.USAGE
    assert pool.asked == []


def test_a_refusal_of_the_pool_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_that_answers(refusal("refused", "worker 0 is loading")) as pool:
        assert run(pool, "0") == Exit.FAILED
    assert "worker 0 is loading" in capsys.readouterr().err


def test_an_answer_of_another_version_is_no_success() -> None:
    with pool_that_answers(ok({"worker": 0})) as pool:
        assert run(pool, "0") == Exit.UNREACHABLE
