"""The journal's file: bounded, written whole, read with distrust, found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpupool.journal_file import JournalFile, before, find, link, read


def line(n: int) -> bytes:
    return json.dumps({"n": n, "event": "e" * 50}).encode() + b"\n"


def write(path: Path, numbers: range, half_bytes: int = 1 << 20) -> JournalFile:
    file = JournalFile(path, half_bytes=half_bytes)
    for n in numbers:
        file.put(line(n))
    file.close()
    return file


def numbers(path: Path) -> list[int]:
    return [event["n"] for event in read(path) or ()]


def test_what_is_written_is_read_again_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "events"
    assert read(path) is None

    assert write(path, range(3)).dropped == 0
    write(path, range(3, 5))

    assert numbers(path) == [0, 1, 2, 3, 4]
    assert path.stat().st_mode & 0o137 == 0


def test_the_file_is_turned_over_in_two_halves_and_never_larger(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for n in range(200):
        write(path, range(n, n + 1), half_bytes=1000)

    assert path.stat().st_size <= 1000
    assert before(path).stat().st_size <= 1000
    kept = numbers(path)
    assert kept == list(range(kept[0], 200))
    assert len(kept) > 12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events", "events.1"]


def test_a_line_that_broke_off_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(line(1) + line(2)[:20])

    write(path, range(3, 4))

    assert numbers(path) == [1, 3]


def test_of_a_file_that_has_grown_otherwise_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b"".join(line(n) for n in range(1000)))

    events = read(path, half_bytes=10_000) or []

    assert events[-1]["n"] == 999
    assert 100 < len(events) < 200


@pytest.mark.parametrize("place", ["/dev/full", "/proc/1/none/events", "FOLDER"])
def test_what_cannot_be_written_is_counted_and_harms_nothing(tmp_path: Path, place: str) -> None:
    assert write(tmp_path if place == "FOLDER" else Path(place), range(5)).dropped == 5


def test_a_command_finds_the_file_by_the_link_or_by_its_name(tmp_path: Path) -> None:
    runtime, state = tmp_path / "run", tmp_path / "state"
    runtime.mkdir()
    state.mkdir()
    assert find(runtime) is None
    write(runtime / "old.events.jsonl", range(1))
    assert find(runtime) == runtime / "old.events.jsonl"
    write(state / "p.events.jsonl", range(1))
    for _ in range(2):
        link(runtime, state / "p.events.jsonl")

    assert find(runtime) == state / "p.events.jsonl"
