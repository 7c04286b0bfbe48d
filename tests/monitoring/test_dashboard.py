"""The dashboard's JSON: read by Grafana's own types, and every query by the grammar of PromQL."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard

from support.panels import ALL_RULES, DASHBOARD, queries, selectors
from support.prometheus import CONFIGS

PANELS = [p for p in DASHBOARD["panels"] if p["type"] != "row"]


def lost(before: Any, after: Any, path: str = "$") -> Iterator[str]:
    """What was in one document and is not in the other."""
    if isinstance(before, dict):
        for key, value in before.items():
            if isinstance(after, dict) and key in after:
                yield from lost(value, after[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(before, list):
        for n, value in enumerate(before):
            yield from lost(value, after[n] if isinstance(after, list) and n < len(after) else None, f"{path}[{n}]")


def through_grafanas_types(document: dict[str, Any]) -> Any:
    """Read it by the types that Grafana publishes and write it again: a field that they do not know vanishes."""
    register_default_plugins()
    return json.loads(json.dumps(dashboard.Dashboard.from_json(document), cls=JSONEncoder))


def test_grafanas_types_know_every_field() -> None:
    assert list(lost(DASHBOARD, through_grafanas_types(DASHBOARD))) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    """Guards the test above: it must be able to fail, in panels and in queries."""
    document = json.loads(json.dumps(DASHBOARD).replace('"legendFormat"', '"legendFormt"').replace('"gridPos"', '"gridpos"'))
    found = set(lost(document, through_grafanas_types(document)))
    assert {"$.panels[1].gridpos", "$.panels[1].targets[0].legendFormt"} <= found


def test_the_json_is_what_the_list_of_panels_makes() -> None:
    made = runpy.run_path(str(CONFIGS / "grafana" / "dashboard.py"))["text"]()
    assert (CONFIGS / "grafana" / "gpupool.json").read_text() == made, "run `python configs/grafana/dashboard.py`"


def test_the_rows_are_there() -> None:
    rows = [p["title"] for p in DASHBOARD["panels"] if p["type"] == "row"]
    assert rows == ["Overview", "Latency by stage", "Batches", "Memory", "Cards", "Errors", "Restarts", "The pool itself"]


def test_panels_have_ids_units_and_places_of_their_own() -> None:
    assert len({p["id"] for p in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(p["fieldConfig"]["defaults"]["unit"] for p in PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_query_can_be_chosen_by_pool() -> None:
    """One dashboard for many pools: a query that forgets the variable would add them up. The count of alerts is of all, and says so."""
    without = {p["title"] for p in PANELS for t in p["targets"] if "$instance" not in t["expr"]}
    assert without == {"Alerts"}


def test_variables_are_the_ones_that_queries_use() -> None:
    names = {v["name"] for v in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "instance", "model", "worker"}


@pytest.mark.parametrize("expression", [*queries().values(), *(rule["expr"] for rule in ALL_RULES)])
def test_expressions_are_promql(expression: str) -> None:
    promql_parser.parse(expression)
    assert list(selectors(expression))
