"""The reference and the commented configuration say what the schema says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gpupool.config import load_config
from gpupool.config_errors import tables
from gpupool.config_schema import DEFAULT_DEGRADE, Batching, Document
from gpupool.manifest import Manifest
from gpupool.paths import ENV_DIR
from gpupool.supervisor.reload import LIVE

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "configuration.md").read_text()
TABLES = tables(Document)
#: Tables by the names of clients; their keys have no defaults of their own.
BOUNDS = "router.curve.clients"


def rows(section: str) -> dict[str, list[str]]:
    """The cells of a section's rows by key."""
    found = re.search(
        rf"^## \[+{re.escape(section)}(?:\.NAME)?\]+\n(.*?)(?=^## |^A model directory|\Z)", REFERENCE, re.DOTALL | re.MULTILINE
    )
    assert found, f"no section for [{section}]"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines() if line.startswith("| `")]
    return {key: cells for cells in lines for key in re.findall(r"`(\w+)`", cells[0])}


def default_of(schema: type[BaseModel], key: str) -> Any:
    """A key's default as plain values."""
    field = schema.model_fields[key]
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    return field.get_default(call_default_factory=True)


@pytest.mark.parametrize("section", TABLES)
def test_the_reference_names_every_key_of_a_table_and_no_other(section: str) -> None:
    assert rows(section).keys() == TABLES[section].model_fields.keys()


@pytest.mark.parametrize(
    ("section", "key"), [(name, key) for name, schema in TABLES.items() for key in schema.model_fields if key != "curve"]
)
def test_the_reference_states_the_true_default(section: str, key: str) -> None:
    stated, default = rows(section)[key][2].strip("`"), default_of(TABLES[section], key)

    if section == BOUNDS or (section == "model" and key in Batching.model_fields):
        assert (stated, default) == ("absent", None)
    elif default == "required":
        assert stated == "required"
    else:
        plain = list(default) if isinstance(default, tuple) else default
        assert tomllib.loads(f"v = {stated}")["v"] == plain


@pytest.mark.parametrize(("section", "key"), [(name, key) for name, schema in TABLES.items() for key in schema.model_fields])
def test_the_reference_says_which_keys_are_live(section: str, key: str) -> None:
    live = f"{section}.{key}".startswith(LIVE) or (section == "model" and key in Batching.model_fields)

    assert rows(section)[key][-1] == ("live" if live else "restart")


def test_the_reference_states_the_default_degrade_rules() -> None:
    for rule in DEFAULT_DEGRADE:
        assert f"`{rule.healthy_below}, {rule.batch_factor}, {rule.window_factor}`" in REFERENCE


def test_the_reference_names_every_key_of_a_manifest() -> None:
    section = REFERENCE.split("A model directory holds")[1].split("## ")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == Manifest.model_fields.keys()


def test_the_commented_configuration_shows_every_key_with_its_default() -> None:
    """Commented-out keys are the defaults; the file with all of them in force must say the same as without."""
    text = (ROOT / "configs" / "gpu-host.toml").read_text()
    shown = tomllib.loads(re.sub(r"^# (\w+ = .*|\[router\.curve[.\w]*\].*)$", r"\1", text, flags=re.MULTILINE))

    commented = set(re.findall(r"^# (\w+) = ", text, re.MULTILINE))
    for section, schema in TABLES.items():
        values: Any = shown
        for step in section.split("."):
            values = values[step]
            values = values[0] if isinstance(values, list) else values
        unshown = set(schema.model_fields) - set(values) - {"curve", "handler"}
        free = {"model": set(Batching.model_fields), BOUNDS: set(TABLES[BOUNDS].model_fields)}
        assert unshown <= free.get(section, set())
        for key, value in values.items():
            if key in commented and key in schema.model_fields and section != "model":
                default = default_of(schema, key)
                assert value == (list(default) if isinstance(default, tuple) else default), f"{section}.{key}"


@pytest.mark.parametrize("name", ["cpu.toml", "gpu-host.toml"])
def test_the_shipped_configurations_are_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small stand-in for the model, whose files are fetched and not part of the source."""
    monkeypatch.delenv(ENV_DIR, raising=False)
    directory = tmp_path / "models" / "minilm"
    directory.mkdir(parents=True)
    (directory / "handler.py").write_text("class Embedder: ...\n")
    (directory / "manifest.json").write_text('{"name": "minilm", "version": "1", "handler": "handler:Embedder"}')
    (tmp_path / name).write_text((ROOT / "configs" / name).read_text())

    assert [spec.name for spec in load_config(tmp_path / name).specs] == ["minilm"]
