"""The dashboard and the rules as tests read them: every expression with the place where it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import yaml

from support.prometheus import CONFIGS, RULES

DASHBOARD: dict[str, Any] = json.loads((CONFIGS / "grafana" / "gpupool.json").read_text())
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
ALL_RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}


def filled_in(expression: str, instance: str = ".*") -> str:
    """An expression as Grafana sends it when everything is chosen at the top, or one pool."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "4s").replace("$instance", instance))


def queries(instance: str = ".*") -> dict[str, str]:
    """Expressions of the dashboard, filled in, by row, panel and legend."""
    found: dict[str, str] = {}
    row = ""
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", []):
            found[f"{row} / {panel['title']} / {target['legendFormat'] or target['refId']}"] = filled_in(
                target["expr"], instance
            )
    return found


def selectors(expression: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Each metric that an expression reads, with the labels that it matches."""
    waiting: list[Any] = [promql_parser.parse(expression)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, promql_parser.VectorSelector):
            yield str(node.name), frozenset(m.name for m in node.matchers.matchers)
        parts = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector", "param")]
        waiting += [p for p in (*parts, *(getattr(node, "args", None) or [])) if isinstance(p, promql_parser.Expr)]
