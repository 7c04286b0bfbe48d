"""The journal in memory: what belongs into it, whose card it was, how much is kept and given out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gpupool.journal import Wanted, parse
from gpupool.supervisor.journal import MAX_ANSWER_BYTES, Journal


def record(event: str = "worker_exited", level: str = "error", time: float = 100.0, **fields: Any) -> dict[str, Any]:
    return {"time": time, "timestamp": "", "level": level, "component": "supervisor", "event": event, **fields}


def names(journal: Journal, limit: int = 100, **wanted: Any) -> list[str]:
    return [event["event"] for event in journal.select(Wanted(**wanted), limit)]


@pytest.mark.parametrize(("event", "level"), [("output", "info"), ("request", "info"), ("card_note", "debug")])
def test_what_models_print_what_requests_came_to_and_what_is_for_debugging_stays_out(event: str, level: str) -> None:
    journal = Journal()

    assert journal.add(record(event, level)) is None
    assert journal.select(Wanted(), 10) == []
    assert journal.last == 0


def test_an_event_about_a_worker_says_which_card_and_one_about_a_card_which_worker() -> None:
    journal = Journal(["GPU-a", "GPU-b"])
    journal.add(record(worker=1))
    journal.add(record("card_note", "warning", device="GPU-a"))
    journal.add(record("asked", "info", workers=[1, 0]))
    journal.add(record("asked", "info", workers=[7]))

    told, note, asked, strange = journal.select(Wanted(), 10)

    assert (told["worker"], told["device"]) == (1, "GPU-b")
    assert (note["worker"], note["device"]) == (0, "GPU-a")
    assert asked["devices"] == ["GPU-b", "GPU-a"]
    assert "devices" not in strange


def test_those_that_are_wanted_are_given_out_the_oldest_first() -> None:
    journal = Journal(["GPU-a", "GPU-b"])
    journal.add(record("a", "info", 1.0, worker=0))
    journal.add(record("b", "warning", 2.0, worker=1))
    journal.add(record("c", "error", 3.0, workers=[0, 1]))
    journal.add(record("d", "info", 4.0))

    assert names(journal) == ["a", "b", "c", "d"]
    assert names(journal, 2) == ["c", "d"]
    assert names(journal, level="warning") == ["b", "c"]
    assert names(journal, worker="1") == names(journal, worker="GPU-b") == ["b", "c"]
    assert names(journal, since=3.0) == ["c", "d"]
    assert names(journal, after=2) == ["c", "d"]


def test_only_the_newest_are_kept_and_numbers_go_on_after_a_restart() -> None:
    journal = Journal(kept=3)
    lines = [journal.add(record(str(n))) for n in range(5)]
    assert names(journal) == ["2", "3", "4"]

    again = Journal(kept=3)
    again.restore(parse(b"".join(line for line in lines if line)))
    again.add(record("new"))

    assert names(again) == ["3", "4", "new"]
    assert [event["n"] for event in again.select(Wanted(), 9)] == [4, 5, 6]


@pytest.mark.parametrize(
    ("story", "last"),
    [
        ([], None),
        (["pool_starting", "pool_ready", "pool_stopped"], None),
        (["pool_starting", "supervisor_failed", "library_log"], None),
        (["pool_starting", "pool_ready", "worker_exited"], "worker_exited"),
        (["pool_stopped", "pool_starting"], "pool_starting"),
        (["pool_starting", "earlier_supervisor_died", "pool_starting", "pool_stopped"], None),
        (["worker_exited"] * 5, "worker_exited"),  # so many that its beginning is not kept
    ],
)
def test_a_story_without_an_end_is_one_that_was_broken_off(story: list[str], last: str | None) -> None:
    journal = Journal()
    journal.restore({"n": n, "event": event} for n, event in enumerate(story))
    found = journal.broken_off()
    assert (found and found["event"]) == last


def test_a_number_is_not_used_again_though_the_file_lags_or_is_lost() -> None:
    journal = Journal(now=1000.0)
    lines = [journal.add(record(str(n), time=1000.0 + n)) for n in range(50)]

    for kept in (lines[:10], []):
        again = Journal(now=1001.0)
        again.restore(parse(b"".join(line for line in kept if line)))
        for n in range(5):
            again.add(record(f"new {n}"))
        assert names(again, after=journal.last) == [f"new {n}" for n in range(5)]


def test_numbers_go_on_when_the_clock_was_set_back() -> None:
    journal = Journal(now=1.0)
    journal.restore([{"n": 5000, "event": "old"}])
    journal.add(record("new"))

    assert [event["n"] for event in journal.select(Wanted(), 9)] == [5000, 5001]


def test_events_of_any_size_and_kind_are_bounded_one_by_one_and_together() -> None:
    journal = Journal()
    for _ in range(1000):
        journal.add(record(error="x" * 100_000, odd={1: b"\xff", "n": float("nan")}, set={1}))

    found = journal.select(Wanted(), 1000)

    assert len(orjson.dumps(found[0])) <= 4096
    assert 100 < len(found) < 1000
    assert len(orjson.dumps(found)) <= MAX_ANSWER_BYTES + 1000
    assert found[-1]["n"] == 1000


@pytest.mark.parametrize(
    "damage",
    [
        '"time":1e300',
        '"time":1e999',
        '"time":NaN',
        '"time":1796090642999',
        '"time":null',
        '"n":99999999999999999999999',
        '"n":-1',
    ],
)
def test_numbers_that_no_journal_can_hold_are_passed_over(damage: str) -> None:
    assert list(parse(b'{"event":"zz",' + damage.encode() + b"}\n")) == []


def test_lines_that_are_torn_or_strange_are_passed_over() -> None:
    good = b'{"n": 1, "event": "a"}\n'

    assert list(parse(b'rn": 0}\n' + good + b'[1]\n"x"\n{"n": 2}\n\n' + good + b'{"n": 3, "ev')) == [{"n": 1, "event": "a"}] * 2
