"""What is wrong with a configuration, all of it at once: key path, what was expected, what was found, and the nearest known key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import ErrorDetails, PydanticCustomError

Location = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class ConfigError:
    """One mistake. `path` is the key's full path (`model[0].max_batch`), or `line 3, column 5` where there are no keys yet."""

    path: str
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.path}: expected {self.expected}, found {self.found}"
        return f"{text}; {self.hint}" if self.hint else text


class ConfigErrors(Exception):
    """A configuration was refused.

    Attributes:
        source: the file.
        errors: every mistake that was found in it.
    """

    def __init__(self, source: Path, errors: Sequence[ConfigError]) -> None:
        super().__init__(source, errors)
        self.source = source
        self.errors = list(errors)

    def __str__(self) -> str:
        return "\n".join(f"{self.source}: {error}" for error in self.errors)


def malformed(expected: str, hint: str = "") -> PydanticCustomError:
    """Make the error that a validator raises: pydantic adds where, `explain` puts it into words."""
    return PydanticCustomError("malformed", "{expected}", {"expected": expected, "hint": hint})


def key_path(location: Location) -> str:
    """Write a location as people do: ("model", 0, "name") is `model[0].name`."""
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def shown(value: Any) -> str:
    """Quote a value as it would stand in the file, cut to a length that a terminal can take."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "…"


_EXPECTED: Final = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "text of the form {pattern}",
    "literal_error": "{expected}",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "missing": "a value, it has no default",
    "extra_forbidden": "a known key",
    "malformed": "{expected}",
}


def explain(detail: ErrorDetails, schema: type[BaseModel]) -> ConfigError:
    """Put one of pydantic's errors into our words."""
    location, kind, context = detail["loc"], detail["type"], {k: _short(v) for k, v in detail.get("ctx", {}).items()}
    if isinstance(choices := context.get("expected"), str) and kind == "literal_error":
        context["expected"] = "one of " + choices.replace(" or ", ", ").replace("'", '"')
    expected = _EXPECTED[kind].format_map(context) if kind in _EXPECTED else detail["msg"]
    hint = str(context.get("hint", ""))
    value = detail["input"]
    if kind == "missing":
        return ConfigError(key_path(location), expected, "nothing")
    if kind == "extra_forbidden":
        return ConfigError(key_path(location), expected, f"{shown(location[-1])}", nearest_key(location, schema))
    if kind == "tuple_type" and isinstance(value, Mapping):
        hint = f"write [[{location[-1]}]] with double brackets"
    elif kind == "literal_error" and isinstance(value, str):
        hint = _nearest(value, [c.strip('"') for c in context["expected"].removeprefix("one of ").split(", ")])
    elif kind in {"int_type", "float_type"} and isinstance(value, str) and _is_number(value):
        hint = "write the number without quotes"
    return ConfigError(key_path(location), expected, shown(value), hint)


def tables(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Every table of a schema by its name as written: `router.curve`, `[model]` for each entry of a list."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in schema.model_fields.items():
        for table in _models_in(field.annotation):
            found[name] = table
            found.update({f"{name}.{inner}": t for inner, t in tables(table).items()})
    return found


def nearest_key(location: Location, schema: type[BaseModel]) -> str:
    """Say which known key an unknown one was probably meant to be; a key of another table is told its home."""
    key = str(location[-1])
    home = ".".join(str(step) for step in location[:-1] if isinstance(step, str))
    known = {name: list(table.model_fields) for name, table in tables(schema).items()}
    own = known.get(home) or known.get(home.rpartition(".")[0]) or list(schema.model_fields)  # a table in a table of tables
    if homes := [name for name, keys in known.items() if key in keys and name != home]:
        homes = [name for name in homes if name not in {"model", "degrade"}] or homes
        return "it belongs to " + " or ".join(f"[{name}]" for name in homes)
    if close := difflib.get_close_matches(key, own, n=1):
        return f'did you mean "{close[0]}"?'
    elsewhere = {k: name for name, keys in reversed(known.items()) for k in keys}  # of several homes the first
    if close := difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.75):
        return f'did you mean "{close[0]}" in [{elsewhere[close[0]]}]?'
    return _nearest(key, own)


def _nearest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    if close := difflib.get_close_matches(word, names, n=1):
        return f'did you mean "{close[0]}"?'
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.0)
    return f'the nearest known one is "{close[0]}"' if close else ""


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]


def _short(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, float) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
