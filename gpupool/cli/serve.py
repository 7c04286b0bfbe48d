"""`gpupool serve` and `gpupool check-config`: the same verdict on a configuration; one then runs the pool."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpupool.exits import Exit
from gpupool.paths import ENV_DIR

from .options import JsonOption, RuntimeDirOption
from .output import Failure, print_json, print_text

if TYPE_CHECKING:
    from gpupool.config import Config, ConfigErrors


def serve(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration (TOML).", show_default=False)
    ],
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Run the pool in the foreground, until SIGTERM or SIGINT. SIGHUP reloads the configuration."""
    from gpupool.config import ConfigErrors, load_config  # late: pydantic

    if runtime_dir:  # by the environment, so that reloads and children mean the same pool
        os.environ[ENV_DIR] = str(Path(runtime_dir).absolute())
    try:
        loaded = load_config(config)
    except ConfigErrors as errors:
        _log_refusal(errors)
        return Exit.BAD_CONFIG
    from gpupool.supervisor.main import run  # late: the whole supervisor

    return run(loaded)


def check_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration (TOML).", show_default=False)],
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Check a configuration, and the models that it names, as serve would."""
    from gpupool.config import ConfigErrors, load_config  # late: pydantic

    if runtime_dir:
        os.environ[ENV_DIR] = str(Path(runtime_dir).absolute())
    try:
        loaded = load_config(file)
        _check_devices(loaded)
    except ConfigErrors as errors:
        listed = [dataclasses.asdict(error) for error in errors.errors]
        count = f"{len(listed)} mistake{'s' if len(listed) > 1 else ''}"
        raise Failure("bad_config", f"{file}: {count}\n{errors}", Exit.BAD_CONFIG, errors=listed) from None
    models = [{"name": spec.name, "version": spec.version} for spec in loaded.specs]
    if json_output:
        print_json({"ok": True, "file": str(loaded.source), "models": models})
    else:
        names = ", ".join(f"{spec.name} {spec.version}" for spec in loaded.specs)
        print_text(f"{file}: good; models: {names}")
    return Exit.OK


def _check_devices(config: Config) -> None:
    """Compare the configured devices with this host's, as serve does at its start."""
    from gpupool.config import ConfigError, ConfigErrors  # late: pydantic
    from gpupool.supervisor.devices import DeviceError, choose

    try:
        choose(config.pool.devices, os.environ)
    except DeviceError as e:
        found = str(e).removeprefix("pool.devices: ")
        raise ConfigErrors(config.source, [ConfigError("pool.devices", "devices of this host", found)]) from None


def _log_refusal(errors: ConfigErrors) -> None:
    """Write each mistake as a line of the log, as serve's stderr is one: [logs] cannot be trusted when the file is refused."""
    from gpupool.log_sink import render_json  # late: orjson

    for error in errors.errors:
        now = time.time()
        record: dict[str, Any] = {
            "time": now,
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds"),
            "level": "error",
            "event": "config_error",
            "component": "supervisor",
            "pid": os.getpid(),
            "file": str(errors.source),
            **dataclasses.asdict(error),
            "message": str(error),
        }
        sys.stderr.buffer.write(render_json(record))
    sys.stderr.flush()
