"""poison list and clear: what they ask, print, and refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpupool.cli import main
from gpupool.exits import Exit
from support.fake_pool import FakePool, document, ok, refusal, steady

ENTRY: dict[str, Any] = {
    "hash": "ab" * 16, "model": "echo", "input_bytes": 12, "worker_deaths": 2, "age_s": 61.5, "expires_in_s": 3538.5,
    "refused": 3,
}  # fmt: skip


def run(pool: FakePool, *arguments: str) -> int:
    return main(["poison", *arguments, "--runtime-dir", str(pool.folder)])


def test_list_shows_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(steady(document(poisoned=1, poison=[ENTRY]))) as pool:
        assert run(pool, "list") == Exit.OK
        text = capsys.readouterr().out
        assert run(pool, "list", "--json") == Exit.OK

    assert ENTRY["hash"][:8] in text.replace("\n", "")
    assert "3538 s" in text
    assert json.loads(capsys.readouterr().out) == {"poisoned": 1, "poison": [ENTRY]}


def test_an_empty_list_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(steady(document(poisoned=0, poison=[]))) as pool:
        assert run(pool, "list") == Exit.OK

    assert capsys.readouterr().out == "nothing is refused as poison\n"


def test_clear_asks_for_each_hash_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(steady({"cleared": 1})) as pool:
        assert run(pool, "clear", "ab12", "cd", "--json") == Exit.OK

    assert [(r["verb"], r["hash"]) for r in pool.asked] == [("clear_poison", "ab12"), ("clear_poison", "cd")]
    assert json.loads(capsys.readouterr().out) == {"cleared": 2}


def test_clear_all_needs_the_word() -> None:
    with FakePool(steady({"cleared": 4})) as pool:
        assert run(pool, "clear") == Exit.USAGE
        assert run(pool, "clear", "") == Exit.USAGE
        assert run(pool, "clear", "ab", "--all") == Exit.USAGE
        assert run(pool, "clear", "--all") == Exit.OK

    assert [r["hash"] for r in pool.asked] == [""]


@pytest.mark.parametrize(
    ("answer", "code"),
    [(refusal("unknown_hash", "no such"), Exit.FAILED), (ok("what?"), Exit.UNREACHABLE)],
)
def test_refusals_and_nonsense_are_told(answer: Any, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with FakePool(lambda _: answer) as pool:
        assert run(pool, "clear", "ab", "--json") == code

    assert "error" in json.loads(capsys.readouterr().out)
