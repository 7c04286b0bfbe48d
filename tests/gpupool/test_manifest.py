"""Model directories: what a manifest must say, and that its files are what it says they are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gpupool.config import ConfigErrors, load_config, model_specs
from gpupool.manifest import read_manifest
from gpupool.paths import ENV_DIR

GOOD: dict[str, Any] = {"name": "m", "version": "2.1", "handler": "handler:Echo", "options": {"a": 1, "b": 2}}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(ENV_DIR, raising=False)
    made = tmp_path / "models" / "m"
    made.mkdir(parents=True)
    (made / "handler.py").write_text("class Echo: ...\n")
    (made / "weights.bin").write_bytes(b"weights")
    return made


def write(directory: Path, manifest: object) -> None:
    (directory / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))


def refusal(directory: Path) -> ConfigErrors:
    with pytest.raises(ConfigErrors) as caught:
        read_manifest(directory)
    return caught.value


def test_a_good_manifest_is_read_and_its_files_are_compared(directory: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    write(directory, GOOD | {"files": {"weights.bin": digest}, "description": "echoes"})

    manifest = read_manifest(directory)

    assert (manifest.name, manifest.version, manifest.handler) == ("m", "2.1", "handler:Echo")
    assert manifest.files == {"weights.bin": digest}


def test_a_file_that_differs_is_named_with_both_hashes(directory: Path) -> None:
    write(directory, GOOD | {"files": {"weights.bin": "0" * 64}})

    (error,) = refusal(directory).errors

    assert error.path == 'files["weights.bin"]'
    assert "0" * 64 in error.expected
    assert hashlib.sha256(b"weights").hexdigest() in error.found
    assert read_manifest(directory, verify=False).name == "m"


def test_a_listed_file_that_is_missing_is_named(directory: Path) -> None:
    write(directory, GOOD | {"files": {"gone.bin": "0" * 64}})

    assert refusal(directory).errors[0].path == 'files["gone.bin"]'


@pytest.mark.parametrize("name", ["/etc/passwd", "../m/weights.bin", "a/../../b", "", "manifest.json", "a\0b"])
def test_files_outside_the_directory_are_refused(directory: Path, name: str) -> None:
    write(directory, GOOD | {"files": {name: "0" * 64}})

    assert "files" in refusal(directory).errors[0].path


MISTAKES: dict[str, tuple[object, str, str]] = {
    "no JSON": ("{", "", "valid JSON"),
    "a list": ([], "", "a table"),
    "NaN": ('{"name": NaN}', "", "valid JSON found NaN"),
    "unknown key": (GOOD | {"versoin": "1"}, "versoin", 'did you mean "version"?'),
    "no version": ({k: v for k, v in GOOD.items() if k != "version"}, "version", "it has no default"),
    "number as version": (GOOD | {"version": 1}, "version", "text in quotes found 1"),
    "no handler": (GOOD | {"handler": ""}, "handler", "module:Class"),
    "no class": (GOOD | {"handler": "handler"}, "handler", "pkg.module:Class"),
    "short hash": (GOOD | {"files": {"weights.bin": "abc"}}, "files.weights.bin", "[0-9a-f]{64}"),
}


@pytest.mark.parametrize(("manifest", "path", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_a_manifest_is_refused_with_its_key(directory: Path, manifest: object, path: str, words: str) -> None:
    write(directory, manifest)

    (error,) = refusal(directory).errors

    assert error.path == path
    assert words in f"{error.expected} found {error.found} {error.hint}"


def test_a_directory_without_manifest_is_refused(directory: Path) -> None:
    assert refusal(directory).errors[0].expected == "a readable manifest.json"


def test_a_huge_manifest_is_refused(directory: Path) -> None:
    write(directory, " " * (1 << 20) + "{}")

    assert refusal(directory).errors[0].found == "a larger file"


def config_in(directory: Path, model: str) -> Path:
    file = directory.parent.parent / "pool.toml"
    file.write_text(f"[[model]]\n{model}\n")
    return file


def test_a_configured_directory_becomes_a_spec_and_the_files_options_go_over_the_manifests(directory: Path) -> None:
    write(directory, GOOD)

    (spec,) = model_specs(load_config(config_in(directory, 'name = "m"\npath = "models/m"\noptions = {b = 3}\nmax_batch = 5')))

    assert (spec.name, spec.version, spec.handler, spec.directory) == ("m", "2.1", "handler:Echo", str(directory))
    assert spec.options == {"a": 1, "b": 3}
    assert (spec.batching.max_batch, spec.batching.min_batch) == (5, 5)


def refused_model(directory: Path, model: str = 'name = "m"\npath = "models/m"') -> str:
    with pytest.raises(ConfigErrors) as caught:
        load_config(config_in(directory, model))
    (error,) = caught.value.errors
    assert error.path in {"model[0].path", "model[0].options"}
    return str(error)


def test_two_names_that_differ_are_both_told(directory: Path) -> None:
    write(directory, GOOD | {"name": "other"})

    text = refused_model(directory)

    assert '"m"' in text and '"other"' in text


def test_a_mistake_in_a_manifest_is_told_under_the_models_path(directory: Path) -> None:
    write(directory, GOOD | {"versoin": "1"})

    assert "versoin: expected" not in refused_model(directory).split(";")[0].split(": ", 1)[0]
    assert 'did you mean "version"?' in refused_model(directory)


def test_a_handler_that_the_directory_lacks_is_refused(directory: Path) -> None:
    write(directory, GOOD | {"handler": "handler:Eco"})

    assert 'but a "Echo"' in refused_model(directory)


def test_options_of_manifests_count_against_the_limit(directory: Path) -> None:
    write(directory, GOOD | {"options": {"text": "x" * 70_000}})

    assert "at most 65536 bytes" in refused_model(directory)
