"""A model directory: its manifest.json says what the model is called, which class serves it, and which files it must consist of.

```json
{"name": "minilm", "version": "1", "handler": "handler:Embedder", "options": {}, "files": {"model.safetensors": "<sha256>"}}
```

Does not cover: running the handler (see worker), nor finding its class (see handler_source).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, ValidationError

from gpupool.config_errors import ConfigError, ConfigErrors, explain, malformed, shown
from gpupool.config_forms import parse_handler
from gpupool.config_schema import Name, Table

FILE_NAME: Final = "manifest.json"
_MAX_BYTES: Final = 1 << 20


def _parse_file_name(value: Any) -> str:
    parts = PurePosixPath(value).parts
    if not parts or value.startswith("/") or ".." in parts or "\0" in value:
        raise malformed("the path of a file inside the model directory", "no absolute paths and no ..")
    if value == FILE_NAME:
        raise malformed("other files than the manifest itself")
    return str(value)


def _parse_required_handler(value: Any) -> str:
    if value == "":
        raise malformed('an import path like "module:Class"')
    return parse_handler(value)


FileName = Annotated[str, PlainValidator(_parse_file_name)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(Table):
    """The contents of manifest.json.

    Attributes:
        handler: "module:Class", looked up in the model directory first.
        options: defaults for the handler's options; those of the [[model]] go over them, key by key.
        files: SHA-256 by path inside the directory; the model is refused unless every one matches.
    """

    name: Name
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
    handler: Annotated[str, PlainValidator(_parse_required_handler)]
    options: dict[str, Any] = Field(default_factory=dict)
    files: dict[FileName, Sha256] = Field(default_factory=dict)
    description: str = ""


def read_manifest(directory: Path, *, verify: bool = True) -> Manifest:
    """Read a model directory's manifest and, unless told not to, compare every listed file with its hash.

    Raises:
        ConfigErrors: with all that is wrong; key paths are those inside the manifest, "" for the file as a whole.
    """
    source = directory / FILE_NAME
    if not directory.is_dir():
        raise ConfigErrors(source, [ConfigError("", "a model directory", f"no directory {directory}")])
    try:
        with source.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as e:
        raise ConfigErrors(source, [ConfigError("", f"a readable {FILE_NAME}", e.strerror or str(e))]) from None
    if len(text) > _MAX_BYTES:
        raise ConfigErrors(source, [ConfigError("", f"at most {_MAX_BYTES} bytes", "a larger file")])
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ConfigErrors(source, [ConfigError("", "valid JSON", str(e))]) from None
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as e:
        raise ConfigErrors(source, [explain(detail, Manifest) for detail in e.errors(include_url=False)]) from None
    if verify and (errors := _file_errors(directory, manifest)):
        raise ConfigErrors(source, errors)
    return manifest


def _file_errors(directory: Path, manifest: Manifest) -> list[ConfigError]:
    errors = []
    for name, expected in manifest.files.items():
        path, file = f'files["{name}"]', directory / name
        if not file.is_file():
            errors.append(ConfigError(path, "a file in the model directory", "no such file"))
            continue
        try:
            with file.open("rb") as data:
                found = hashlib.file_digest(data, "sha256").hexdigest()
        except OSError as e:
            errors.append(ConfigError(path, "a readable file", e.strerror or str(e)))
            continue
        if found != expected:
            errors.append(ConfigError(path, f"SHA-256 {expected}", shown(found), "the file differs from the one described"))
    return errors


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
