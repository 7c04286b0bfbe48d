"""Read a configuration file: TOML into checked, immutable tables, with relative paths made absolute and models looked up.

Order of precedence for the runtime directory: command line flag (which `serve` passes on as GPUPOOL_RUNTIME_DIR), GPUPOOL_RUNTIME_DIR,
the file, the default. Nothing else is taken from the environment.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gpupool.config_checks import batching_of, findings, followed, options_findings
from gpupool.config_errors import ConfigError, ConfigErrors, Location, explain, key_path
from gpupool.config_schema import (
    Batching,
    Curve,
    Degrade,
    Document,
    Http,
    Logs,
    Memory,
    Model,
    Pool,
    Router,
    Supervision,
    Traces,
)
from gpupool.handler_source import handler_problem
from gpupool.keys import KeyFileError, is_key, read_secret
from gpupool.manifest import read_manifest
from gpupool.paths import ENV_DIR, MAX_SOCKET_PATH, RuntimeDir, default_runtime_dir
from gpupool.spec import BatchingSpec, LogSpec, ModelSpec
from gpupool.trace_headers import HeadersError, exporter_missing, read_headers

__all__ = ["Config", "ConfigError", "ConfigErrors", "load_config", "log_spec", "model_specs"]

_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Config:
    """A checked configuration: one attribute for each table. Paths are absolute, and `pool.runtime_dir` is never empty.

    Attributes:
        source: the file.
        specs: what the router and the workers are told of each model, in the order of the file.
    """

    source: Path
    pool: Pool
    router: Router
    supervision: Supervision
    batching: Batching
    memory: Memory
    degrade: tuple[Degrade, ...]
    model: tuple[Model, ...]
    http: Http
    logs: Logs
    traces: Traces
    specs: tuple[ModelSpec, ...]

    @property
    def folder(self) -> Path:
        """The file's folder: handler modules are looked up here."""
        return self.source.parent

    @property
    def runtime(self) -> RuntimeDir:
        """Where the pool keeps its sockets."""
        return RuntimeDir(Path(self.pool.runtime_dir))


def load_config(path: Path) -> Config:
    """Read and check a configuration file, the models that it names included (files of a model directory are hashed).

    Raises:
        ConfigErrors: with everything that is wrong.
    """
    source = Path(path).absolute()
    document, errors, refused = _checked(_parsed(source))
    if document is None:
        raise ConfigErrors(source, errors)
    tables = _resolved(document, source.parent)
    errors += [error for about, error in findings(document) if not _touches(about, refused)]
    errors += _surroundings(tables)
    specs: list[ModelSpec] = []
    for i, model in enumerate(tables.model):
        batching = BatchingSpec(**batching_of(document, document.model[i]).model_dump())
        found = _model_spec(source.parent, model, batching, f"model[{i}]")
        if isinstance(found, ModelSpec):
            specs.append(found)
        elif not _touches((f"model[{i}].name", f"model[{i}].path", f"model[{i}].handler"), refused):
            errors += found
    if not errors:  # once more, for now the options in manifests count as well
        errors += [error for _, error in options_findings({f"model[{i}].options": s.options for i, s in enumerate(specs)})]
    if errors:
        raise ConfigErrors(source, errors)
    return Config(source=source, specs=tuple(specs), **dict(tables))


def model_specs(config: Config) -> tuple[ModelSpec, ...]:
    """Return what the router and the workers are told of each model: manifests read, batching resolved."""
    return config.specs


def log_spec(config: Config) -> LogSpec:
    """Return [logs] as a process is told it."""
    logs = config.logs
    return LogSpec(**logs.model_dump())


def _parsed(source: Path) -> dict[str, Any]:
    try:
        with source.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as e:
        raise ConfigErrors(source, [ConfigError("file", "a readable file", e.strerror or str(e))]) from None
    if len(data) > _MAX_BYTES:
        raise ConfigErrors(source, [ConfigError("file", f"at most {_MAX_BYTES} bytes", "a larger file")])
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        column = e.start - data.rfind(b"\n", 0, e.start)
        where = f"line {line}, column {column}"
        raise ConfigErrors(source, [ConfigError(where, "UTF-8 text", f"byte {data[e.start]:#04x}")]) from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise ConfigErrors(source, [_syntax_error(str(e), text)]) from None


def _syntax_error(message: str, text: str) -> ConfigError:
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
    if match:
        what, line, column = match[1], int(match[2]), int(match[3])
    else:
        lines = text.split("\n")
        what, line, column = message.removesuffix(" (at end of document)"), len(lines), len(lines[-1]) + 1
    return ConfigError(f"line {line}, column {column}", "valid TOML", what)


def _checked(raw: dict[str, Any]) -> tuple[Document | None, list[ConfigError], set[str]]:
    """Check key by key. Refused keys are taken out and the rest is checked on, so that one mistake does not hide another."""
    try:
        return Document.model_validate(raw), [], set()
    except ValidationError as e:
        details = _told_once(e.errors(include_url=False))
    errors = [explain(detail, Document) for detail in details]
    refused = [_key_of(detail["loc"]) for detail in details]
    sound = copy.deepcopy(raw)
    for location in refused:
        _remove(sound, location)
    try:
        document = Document.model_validate(sound)
    except ValidationError:
        document = None
    return document, errors, {key_path(location) for location in refused}


def _told_once(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out that a list is too short where that is because its entries were refused."""
    inside = {detail["loc"][:-1] for detail in details}
    return [detail for detail in details if not (detail["type"] == "too_short" and detail["loc"] in inside)]


def _key_of(location: Location) -> Location:
    """Cut a location inside a value down to its key: table.key, or list[i].key."""
    return location[: 3 if len(location) > 1 and isinstance(location[1], int) else 2]


#: Keys of list entries that have no default: a stand-in keeps the other entries where they are.
_STAND_INS: Final[dict[int | str, Any]] = {"name": "unnamed", "healthy_below": 1.0}


def _remove(raw: dict[str, Any], location: Location) -> None:
    *way, last = location
    parent: Any = raw
    try:
        for step in way:
            parent = parent[step]
    except (KeyError, IndexError):  # it went with another one
        return
    if not isinstance(parent, dict):
        raw.pop(str(location[0]), None)
    elif len(location) == 3 and last in _STAND_INS:
        parent[last] = _STAND_INS[last]
    else:
        parent.pop(last, None)


def _touches(about: tuple[str, ...], refused: set[str]) -> bool:
    return any(_within(one, other) or _within(other, one) for one in about for other in refused)


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def _resolved(document: Document, folder: Path) -> Document:
    """Make paths absolute and let defaults follow their limits."""
    pool, router, logs, traces = document.pool, document.router, document.logs, document.traces
    runtime = os.environ.get(ENV_DIR, "")
    if runtime:
        runtime = str(Path(runtime).absolute())
    elif pool.runtime_dir:
        runtime = str(folder / pool.runtime_dir)
    bind = tuple(f"ipc://{folder / e.removeprefix('ipc://')}" if e.startswith("ipc://") else e for e in router.bind)
    curve = router.curve
    if curve is not None:
        paths = {key: getattr(curve, key) for key in ("secret_key_file", "authorized_keys_dir")}
        curve = curve.model_copy(update={key: str(folder / path) for key, path in paths.items() if path and not is_key(path)})
    return document.model_copy(
        update={
            "pool": pool.model_copy(update={"runtime_dir": runtime or str(default_runtime_dir())}),
            "router": router.model_copy(update={"bind": bind, "curve": curve, **followed(router, router.model_dump())}),
            "batching": document.batching.model_copy(update=followed(document.batching, document.batching.model_dump())),
            "logs": logs.model_copy(update={"file": str(folder / logs.file) if logs.file else ""}),
            "traces": traces.model_copy(
                update={"headers_file": str(folder / traces.headers_file) if traces.headers_file else ""}
            ),
            "model": tuple(m.model_copy(update={"path": str(folder / m.path) if m.path else ""}) for m in document.model),
        }
    )


def _surroundings(tables: Document) -> Iterator[ConfigError]:
    """Yield what the machine would refuse: names too long for a socket, a log file without a folder."""
    runtime = RuntimeDir(Path(tables.pool.runtime_dir))
    if problem := runtime.problem():
        yield ConfigError("pool.runtime_dir", "a shorter path", problem)
    for i, endpoint in enumerate(tables.router.bind):
        if (size := len(os.fsencode(endpoint)) - len("ipc://")) > MAX_SOCKET_PATH and endpoint.startswith("ipc://"):
            yield ConfigError(f"router.bind[{i}]", f"a path of at most {MAX_SOCKET_PATH} bytes", f"{size} bytes: {endpoint}")
    yield from _keys(tables.router.curve)
    if tables.logs.file and not Path(tables.logs.file).parent.is_dir():
        yield ConfigError("logs.file", "a file in an existing folder", tables.logs.file)
    yield from _traces(tables.traces)


def _traces(traces: Traces) -> Iterator[ConfigError]:
    """Yield what keeps spans from being exported: a library that is not installed, headers that cannot be read."""
    if traces.endpoint and (missing := exporter_missing()):
        hint = "pip install 'gpupool[traces]'"
        yield ConfigError("traces.endpoint", '"", for the extra "traces" is not installed', f"no {missing} here", hint)
    if traces.headers_file:
        try:
            read_headers(traces.headers_file)
        except HeadersError as e:
            yield ConfigError("traces.headers_file", 'lines of "Name: value" in a file that only its owner may read', str(e))


def _keys(curve: Curve | None) -> Iterator[ConfigError]:
    """Yield what is wrong with the pool's secret key and the folder of its clients' keys, whose files may come and go."""
    if curve is None:
        return
    secret, folder = curve.secret_key_file, curve.authorized_keys_dir
    if secret and not is_key(secret):  # findings already
        try:
            read_secret(secret)
        except (KeyFileError, OSError) as e:
            hint = "`gpupool keygen` makes one"
            yield ConfigError("router.curve.secret_key_file", "a secret key that only its owner may read", str(e), hint)
    if folder and not is_key(folder):
        try:
            os.scandir(folder).close()
        except OSError as e:
            yield ConfigError("router.curve.authorized_keys_dir", "a readable folder", f"{folder}: {e.strerror or e}")


def _model_spec(folder: Path, model: Model, batching: BatchingSpec, path: str) -> ModelSpec | list[ConfigError]:
    """Resolve one model, or say what is wrong with its directory or handler."""
    if bool(model.path) == bool(model.handler):  # a finding already
        return []
    if not model.path:
        if problem := handler_problem(model.handler, [str(folder)]):
            return [ConfigError(f"{path}.handler", *problem)]
        return ModelSpec(
            model.name,
            handler=model.handler,
            options=model.options,
            batching=batching,
            preprocess_threads=model.preprocess_threads,
        )
    try:
        manifest = read_manifest(Path(model.path))
    except ConfigErrors as e:
        return [
            ConfigError(
                f"{path}.path", f"{error.path}: {error.expected}" if error.path else error.expected, error.found, error.hint
            )
            for error in e.errors
        ]
    if manifest.name != model.name:
        expected = f'"{model.name}" as the name in its manifest.json'
        return [ConfigError(f"{path}.path", expected, f'"{manifest.name}"', "the [[model]] and its manifest must agree")]
    if problem := handler_problem(manifest.handler, [model.path, str(folder)]):
        expected, found = problem
        return [ConfigError(f"{path}.path", f"{expected} (manifest.json: handler)", found)]
    return ModelSpec(
        model.name,
        version=manifest.version,
        handler=manifest.handler,
        directory=model.path,
        options=manifest.options | model.options,
        batching=batching,
        preprocess_threads=model.preprocess_threads,
    )
