"""`gpupool serve` after its configuration was accepted: take the runtime directory, find the devices, run the loop, tell by exit code."""

from __future__ import annotations

import faulthandler
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from gpupool.config import log_spec, model_specs
from gpupool.exits import Exit
from gpupool.logs import Log, configure
from gpupool.paths import RuntimeDir, find_runtime_dir

from .devices import DeviceError, DeviceTrouble, choose
from .instance import AlreadyRunning, Instance, LeftoverProcesses
from .loop import Supervisor

if TYPE_CHECKING:
    from gpupool.config import Config


def run(config: Config) -> int:
    """Run the pool in this process until it has stopped; returns the exit code."""
    # A watchdog's SIGABRT shall leave the stacks in the log.
    faulthandler.enable()
    log = configure("supervisor", log_spec(config))
    try:
        code = _run(config, log)
    except (AlreadyRunning, LeftoverProcesses) as e:
        log.event.error("already_running", error=str(e))
        code = Exit.ALREADY_RUNNING
    except DeviceTrouble as e:
        log.event.error("cannot_start", error=str(e))
        code = Exit.FAILED
    except DeviceError as e:
        log.event.error("config_error", path="pool.devices", error=str(e))
        code = Exit.BAD_CONFIG
    except OSError as e:
        log.event.error("cannot_start", error=f"{type(e).__name__}: {e}")
        code = Exit.FAILED
    log.close()
    return int(code)


def _run(config: Config, log: Log) -> int:
    runtime = RuntimeDir(Path(config.pool.runtime_dir)) if config.pool.runtime_dir else find_runtime_dir(None)
    instance = Instance(runtime)
    try:
        models = model_specs(config)
        devices = choose(
            config.pool.devices, os.environ, warn=lambda reason: log.event.warning("devices_passed_over", reason=reason)
        )

        async def main() -> int:
            supervisor = Supervisor(config, log=log, instance=instance, devices=devices, models=models)
            gc.collect()
            gc.freeze()
            return await supervisor.run()

        return uvloop.run(main())
    finally:
        instance.close()
