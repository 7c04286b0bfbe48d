"""The screen of `top`, driven by keys, before a pool that answers what the test says."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from gpupool.cli import main, top_screen
from gpupool.cli.process_stacks import Stacks
from gpupool.cli.top_screen import Handed, Top
from gpupool.exits import Exit
from gpupool.paths import RuntimeDir
from support.fake_pool import Answer, FakePool, document, ok, refusal, worker


def answers(request: dict[str, Any]) -> Answer:
    match request["verb"]:
        case "status":
            return ok(document(worker(0), worker(1, "drained")))
        case "events":
            return ok({"events": [{"time": 1.0, "level": "info", "event": "pool_ready"}]})
        case verb:
            return ok({"workers": [{"worker": int(request["workers"][0]), "incarnation": 1, "state": f"after {verb}"}]})


def drive(reply: Callable[[dict[str, Any]], Answer], play: Callable[[Top, Pilot[Any], FakePool], Awaitable[None]]) -> None:
    async def act(pool: FakePool) -> None:
        top = Top(RuntimeDir(pool.folder))
        async with top.run_test(size=(80, 24)) as pilot:
            await play(top, pilot, pool)

    with FakePool(reply) as pool:
        asyncio.run(act(pool))


def text(top: Top, name: str) -> str:
    return str(top.query_one(f"#{name}", Static).content)


async def seen(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end, "it was not shown"
        await pilot.pause(0.01)


def steered(pool: FakePool) -> list[dict[str, Any]]:
    return [request for request in pool.asked if request["verb"] not in ("status", "events")]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_screen, "_REFRESH_S", 0.1)


def test_it_shows_the_pool_its_workers_and_events() -> None:
    async def play(top: Top, pilot: Pilot[Any], _: FakePool) -> None:
        await seen(pilot, lambda: "pool_ready" in text(top, "text"))
        assert "p: ready" in text(top, "pool")
        workers = top.query_one("#workers", OptionList)
        assert [str(workers.get_option_at_index(n).prompt).split()[:2] for n in range(2)] == [["0", "ready"], ["1", "drained"]]

    drive(answers, play)


def test_the_keys_steer_the_chosen_worker_and_a_restart_asks_first() -> None:
    async def play(top: Top, pilot: Pilot[Any], pool: FakePool) -> None:
        await seen(pilot, lambda: "pool_ready" in text(top, "text"))
        await pilot.press("d")
        await seen(pilot, lambda: "after drain" in text(top, "message"))
        await pilot.press("down", "r")
        await seen(pilot, lambda: "after resume" in text(top, "message"))
        await pilot.press("R")
        await seen(pilot, lambda: text(top, "message") == "restart worker 1? y/n")
        await pilot.press("n", "y")
        await seen(pilot, lambda: text(top, "message") == "not restarted")
        await pilot.press("R", "y")
        await seen(pilot, lambda: "after restart" in text(top, "message"))
        assert steered(pool) == [
            {"verb": "drain", "workers": ["0"]},
            {"verb": "resume", "workers": ["1"]},
            {"verb": "restart", "workers": ["1"], "force": False},
        ]

    drive(answers, play)


def test_a_pool_that_goes_away_is_told_and_looked_for() -> None:
    gone = threading.Event()

    def reply(request: dict[str, Any]) -> Answer:
        return b"not a pool\n" if gone.is_set() else answers(request)

    async def play(top: Top, pilot: Pilot[Any], _: FakePool) -> None:
        await seen(pilot, lambda: "p: ready" in text(top, "pool"))
        gone.set()
        await seen(pilot, lambda: "NOT REACHABLE" in text(top, "pool"))
        gone.clear()
        await seen(pilot, lambda: "p: ready" in text(top, "pool"))

    drive(reply, play)


def test_a_pool_that_does_not_answer_blocks_no_key() -> None:
    async def play(top: Top, pilot: Pilot[Any], pool: FakePool) -> None:
        await seen(pilot, lambda: bool(pool.asked))
        await pilot.press("p")
        await seen(pilot, lambda: "PAUSED" in text(top, "title"))

    drive(lambda _: None, play)


def test_a_pool_without_events_is_asked_for_them_once() -> None:
    def reply(request: dict[str, Any]) -> Answer:
        return refusal("unknown_verb", "no such verb") if request["verb"] == "events" else answers(request)

    async def play(top: Top, pilot: Pilot[Any], pool: FakePool) -> None:
        await seen(
            pilot, lambda: sum(r["verb"] == "status" for r in pool.asked) > 2 and "keeps no events" in text(top, "title")
        )
        assert sum(request["verb"] == "events" for request in pool.asked) == 1

    drive(reply, play)


def test_stacks_are_shown_in_the_place_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_screen, "look", lambda target, **_: Stacks(target.pid, "signal", "Thread 1\n  forward", False, ""))

    async def play(top: Top, pilot: Pilot[Any], _: FakePool) -> None:
        await seen(pilot, lambda: "pool_ready" in text(top, "text"))
        await pilot.press("s")
        await seen(pilot, lambda: "forward" in text(top, "text"))
        assert text(top, "title") == "worker 0, pid 4000, by signal"
        await pilot.press("e")
        await seen(pilot, lambda: "pool_ready" in text(top, "text"))

    drive(answers, play)


def test_what_comes_while_the_program_is_being_left_is_not_shown() -> None:
    left: list[Top] = []

    async def play(top: Top, pilot: Pilot[Any], _: FakePool) -> None:
        await seen(pilot, lambda: "pool_ready" in text(top, "text"))
        left.append(top)

    drive(answers, play)
    left[0].on_handed(Handed(lambda: left[0]._show_absence("late")))


def test_without_a_terminal_it_says_what_there_is_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == Exit.USAGE
    assert "status --json" in capsys.readouterr().err


class Changing:
    """A pool whose status is what the test says now."""

    def __init__(self, *workers: dict[str, Any]) -> None:
        self.status = document(*workers)

    def __call__(self, request: dict[str, Any]) -> Answer:
        return ok(self.status) if request["verb"] == "status" else answers(request)

    def becomes(self, *workers: dict[str, Any], started_at: str | None = None) -> None:
        """Answer so from now on."""
        status = document(*workers)
        status["pool"]["started_at"] = started_at
        self.status = status


def test_in_a_paused_screen_stacks_are_those_of_the_process_that_the_worker_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_screen, "look", lambda target, **_: Stacks(target.pid, "signal", "Thread 1", False, "\x1b[2J"))
    pool_now = Changing(worker(0, pid=4000))

    async def play(top: Top, pilot: Pilot[Any], _: FakePool) -> None:
        await seen(pilot, lambda: "pool_ready" in text(top, "text"))
        await pilot.press("p")
        pool_now.becomes(worker(0, pid=5000))
        await pilot.press("s")
        await seen(pilot, lambda: text(top, "title").startswith("worker 0, pid 5000, by signal (\\x1b[2J)"))

    drive(pool_now, play)


def test_the_choice_stays_with_its_worker_and_ends_with_it() -> None:
    pool_now = Changing(worker(0), worker(1), worker(2))

    async def play(top: Top, pilot: Pilot[Any], pool: FakePool) -> None:
        workers = top.query_one("#workers", OptionList)
        await seen(pilot, lambda: workers.option_count == 3)
        await pilot.press("down", "down", "R")
        await seen(pilot, lambda: text(top, "message") == "restart worker 2? y/n")
        pool_now.becomes(worker(1), worker(2))
        await seen(pilot, lambda: workers.option_count == 2)
        assert workers.highlighted == 1
        assert text(top, "message") == "restart worker 2? y/n"
        pool_now.becomes(worker(1), worker(3))  # as many, but others
        await seen(pilot, lambda: workers.highlighted is None)
        assert text(top, "message") == "not restarted: worker 2 is no longer part of the pool"
        await pilot.press("y", "d", "r")
        assert steered(pool) == []
        await pilot.press("down", "d")
        await seen(pilot, lambda: "after drain" in text(top, "message"))
        assert steered(pool) == [{"verb": "drain", "workers": ["1"]}]

    drive(pool_now, play)


def test_a_new_pool_under_the_old_pid_takes_over_no_choice_and_no_question() -> None:
    pool_now = Changing(worker(0), worker(1))

    async def play(top: Top, pilot: Pilot[Any], pool: FakePool) -> None:
        workers = top.query_one("#workers", OptionList)
        await seen(pilot, lambda: workers.option_count == 2)
        await pilot.press("R")
        pool_now.becomes(worker(0), worker(1), started_at="later")
        await seen(pilot, lambda: workers.highlighted is None)
        assert text(top, "message") == "not restarted: it is another pool now"
        await pilot.press("y", "d")
        assert steered(pool) == []

    drive(pool_now, play)


def test_a_key_in_a_paused_screen_does_nothing_to_a_pool_that_followed() -> None:
    pool_now = Changing(worker(0))

    async def play(top: Top, pilot: Pilot[Any], pool: FakePool) -> None:
        await seen(pilot, lambda: "pool_ready" in text(top, "text"))
        await pilot.press("p")
        pool_now.becomes(worker(0), started_at="later")
        await pilot.press("d")
        await seen(pilot, lambda: "another pool now" in text(top, "message") or bool(steered(pool)))
        assert steered(pool) == []

    drive(pool_now, play)
