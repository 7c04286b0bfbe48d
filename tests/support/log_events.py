"""Every log event that the sources can write, read from the sources: what docs/logs.md has to name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
LEVELS: Final = frozenset({"debug", "info", "warning", "error", "exception"})
#: Folder of the sources, and the component in whose lines its events stand.
COMPONENTS: Final = {
    "gpupool": "any", "supervisor": "supervisor", "supervisor/cards": "probe", "router": "router", "worker": "worker",
}  # fmt: skip


@dataclass
class Told:
    """One event of one component: at which levels and with which fields it is written somewhere."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


def events() -> dict[tuple[str, str], Told]:
    """All of them, by component and name."""
    found: dict[tuple[str, str], Told] = {}
    for folder, component in COMPONENTS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            for level, name, fields in _in(ast.parse(path.read_text())):
                told = found.setdefault((component, name), Told())
                told.levels |= level
                told.fields |= fields
    return found


def _in(tree: ast.AST) -> Iterator[tuple[set[str], str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):  # records made by hand
            items = {
                key.value: value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)
            }
            for name in _texts(items["event"]) if {"event", "level"} <= items.keys() else ():
                own = {"time", "timestamp", "level", "event"}
                yield set(_texts(items["level"])), name, {str(key) for key in items} - own
        if not isinstance(node, ast.Call):
            continue
        fields = {keyword.arg for keyword in node.keywords if keyword.arg}
        texts = [_texts(argument) for argument in node.args]
        words = [text for each in texts for text in each]
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        )
        if _is_logger(node.func):
            levels = {called} & LEVELS
            names = texts[0] if texts else []
        elif called in ("Report", "report") and words and "slot" not in fields:
            levels = {word for word in words if word in LEVELS} or {"info"}
            names = [word for word in words if word not in LEVELS][: len(texts[0])]
        elif called == "_warn" and texts and texts[0]:
            levels, names = {"warning"}, texts[0]
        elif called in ("_event", "Event") and len(texts) > 1:
            levels, names = set(texts[0]), texts[1]
            fields -= {"told"}  # whether the supervisor is told too
        else:
            continue
        for name in names:
            yield levels, name, (fields - {"exc_info"}) | ({"traceback"} if "exc_info" in fields else set())


def _is_logger(func: ast.expr) -> bool:
    """`….event.info` or `getattr(….event, level)`."""
    if isinstance(func, ast.Call) and isinstance(func.func, ast.Name) and func.func.id == "getattr" and func.args:
        return isinstance(func.args[0], ast.Attribute) and func.args[0].attr == "event"
    return (
        isinstance(func, ast.Attribute)
        and func.attr in LEVELS
        and isinstance(func.value, ast.Attribute)
        and func.value.attr == "event"
    )


def _texts(node: ast.expr) -> list[str]:
    """The texts that an argument can be."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
