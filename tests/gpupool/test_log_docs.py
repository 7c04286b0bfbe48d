"""docs/logs.md names every event that the sources can write, with its fields, and no other; the schema is the tests' own."""

from __future__ import annotations

import json
import re

import pytest

from support import log_lines
from support.log_events import COMPONENTS, ROOT, events

TEXT = (ROOT / "docs" / "logs.md").read_text()
SECTIONS = {**{name: name for name in COMPONENTS.values()}, "any": "Of every component"}
EVENTS = events()


def rows(component: str) -> dict[str, list[str]]:
    """The cells of a component's table by event."""
    found = re.search(rf"^### {SECTIONS[component]}\n(.*?)(?=^### |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found, f"no section for the events of {component}"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells for cells in lines}


@pytest.mark.parametrize("component", SECTIONS)
def test_the_document_names_every_event_of_a_component_and_no_other(component: str) -> None:
    assert rows(component).keys() == {name for which, name in EVENTS if which == component}


@pytest.mark.parametrize("component", SECTIONS)
def test_the_document_names_the_fields_and_levels_of_every_event(component: str) -> None:
    stated = rows(component)
    for (which, name), told in EVENTS.items():
        if which == component:
            _, levels, fields, meaning = stated[name]
            assert told.fields - {"worker", "incarnation"} <= set(re.findall(r"`(\w+)`", fields)), name
            assert levels == "any" or set(levels.split(", ")) <= told.levels, name
            assert meaning, name


def test_the_scan_of_the_sources_finds_each_way_of_writing_an_event() -> None:
    assert {
        ("any", "library_log"), ("any", "log_records_dropped"), ("supervisor", "worker_late"), ("supervisor", "router_exited"),
        ("supervisor", "card_note"), ("router", "request_poisoned"), ("router", "worker_joined"), ("worker", "batch"), ("probe", "xid"),
    } <= EVENTS.keys()  # fmt: skip


def test_the_schema_that_is_published_is_the_one_that_is_checked() -> None:
    """`python -m support.log_lines`, in tests/, writes it again."""
    assert json.loads(log_lines.SCHEMA.read_text()) == log_lines.schema()


@pytest.mark.parametrize(
    "change",
    [
        {"time": "1.5"}, {"timestamp": "2026-01-01"}, {"level": "warn"}, {"event": "Some Event"}, {"component": "client"}, {"pid": None},
        {"event": "request"}, {"worker": "0"}, {"timestamp": "2026-01-01T00:00:00.000000+00:00"}, {"x": "x" * 5000},
    ],
    ids=str,
)  # fmt: skip
def test_the_check_of_a_line_finds_what_is_wrong(change: dict[str, object]) -> None:
    line = {
        "time": 1.5, "timestamp": "1970-01-01T00:00:01.500000+00:00", "level": "info", "event": "e", "component": "router", "pid": 1,
    }  # fmt: skip
    log_lines.check(json.dumps(line))

    with pytest.raises((ValueError, AssertionError)):
        log_lines.check(json.dumps({**line, **change}))
