"""`gpupool serve` after its configuration was accepted: take the runtime directory, find the devices, run the loop, tell by exit code."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from gpupool.board import MAX_SLOTS
from gpupool.config import log_spec
from gpupool.exits import Exit
from gpupool.logs import Log, configure
from gpupool.paths import RuntimeDir, find_runtime_dir
from gpupool.stack_dump import StackDump

from .chronicle import Chronicle
from .devices import DeviceError, DeviceTrouble, choose, overflow_devices
from .instance import AlreadyRunning, Instance, LeftoverProcesses
from .listeners import BindError, Listeners
from .loop import Supervisor
from .state_file import journal_path

if TYPE_CHECKING:
    from gpupool.config import Config


def run(config: Config) -> int:
    """Run the pool in this process until it has stopped; returns the exit code."""
    _take_hold_of_inheritance()
    # A watchdog's SIGABRT shall leave the stacks in the log.
    faulthandler.enable()
    try:
        log = configure("supervisor", log_spec(config))
    except OSError as e:
        log = configure("supervisor", replace(log_spec(config), file=""))
        log.event.error("cannot_start", error=f"logs.file {config.logs.file}: {e.strerror or e}")
        log.close()
        return Exit.FAILED
    try:
        code = _run(config, log)
    except (AlreadyRunning, LeftoverProcesses) as e:
        log.event.error("already_running", error=str(e))
        code = Exit.ALREADY_RUNNING
    except (DeviceTrouble, BindError) as e:
        log.event.error("cannot_start", error=str(e))
        code = Exit.FAILED
    except DeviceError as e:
        log.event.error("config_error", path="pool.devices", error=str(e))
        code = Exit.BAD_CONFIG
    except OSError as e:
        log.event.error("cannot_start", error=f"{type(e).__name__}: {e}")
        code = Exit.FAILED
    except Exception as e:  # a bug of ours: said in one line, and an end with a code, not a process that hangs with the lock
        log.event.error("supervisor_failed", error=f"{type(e).__name__}: {e}", exc_info=e)
        code = Exit.FAILED
    log.close()
    return int(code)


def _take_hold_of_inheritance() -> None:
    """Make good what a careless parent left: closed standard descriptors, blocked signals, a low limit of descriptors."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    # Python leaves None where a descriptor was closed.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # above what the kernel has come to allow since
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _run(config: Config, log: Log) -> int:
    runtime = RuntimeDir(Path(config.pool.runtime_dir)) if config.pool.runtime_dir else find_runtime_dir(None)
    with ExitStack() as stack:
        instance = stack.enter_context(closing(Instance(runtime)))
        StackDump(str(runtime.stacks("supervisor")))
        devices = choose(
            config.pool.devices, os.environ, warn=lambda reason: log.event.warning("devices_passed_over", reason=reason)
        )
        devices += overflow_devices(config.pool.cpu_overflow)
        if len(devices) > MAX_SLOTS:
            raise DeviceError(f"pool.cpu_overflow: {len(devices)} workers in all, at most {MAX_SLOTS} are possible")
        listeners = stack.enter_context(closing(Listeners(config.router.bind, runtime.workers)))
        path = journal_path(os.environ, runtime.path, config.pool.name)
        chronicle = stack.enter_context(closing(Chronicle(log, path, runtime.path, [d.id for d in devices])))

        async def main() -> int:
            supervisor = Supervisor(
                config, log=log, instance=instance, devices=devices, listeners=listeners, chronicle=chronicle
            )
            gc.collect()
            gc.freeze()
            try:
                return await supervisor.run()
            except OSError:
                supervisor.children.kill_all()
                raise
            except Exception as e:  # in here, so that nothing that still runs is waited for on the way out
                log.event.error("supervisor_failed", error=f"{type(e).__name__}: {e}", exc_info=e)
                supervisor.children.kill_all()
                return Exit.FAILED

        return uvloop.run(main())
