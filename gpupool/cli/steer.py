"""The commands that change a running pool: drain, resume, restart-worker, release-device, reload. The order outlives the command that gave it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from gpupool.exits import Exit
from gpupool.paths import RuntimeDir

from .control import ask, status_of, unreachable
from .options import AllOption, JsonOption, NoWaitOption, RuntimeDirOption, WorkersArgument, chosen, positive, runtime_of
from .output import INTERRUPTED, Failure, print_json, print_text
from .waiting import Progress, drain_progress, release_progress, restart_progress

_POLL_S: Final = 0.1
#: Checking a configuration hashes the files of its models, and those can be large.
_RELOAD_TIMEOUT_S: Final = 120.0

TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="S", callback=positive, help="Seconds to wait; the order itself stands.")
]


def drain(
    workers: WorkersArgument = None,
    everyone: AllOption = False,
    timeout: TimeoutOption = 30.0,
    no_wait: NoWaitOption = False,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Give workers no new work and wait until they have finished theirs; the processes stay."""
    runtime = runtime_of(runtime_dir)
    order = ask(runtime, "drain", workers=chosen(workers, everyone=everyone))
    if no_wait:
        return _done(_workers(order), "drain ordered", json_output=json_output)
    seen = {worker["worker"] for worker in _workers(order) if worker["state"] == "draining"}
    progress = _wait(
        runtime, "drain", lambda document: drain_progress(document, _incarnations(order), seen), time.monotonic() + timeout
    )
    return _done(list(progress.workers), None, json_output=json_output)


def resume(
    workers: WorkersArgument = None,
    everyone: AllOption = False,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Give workers work again; a parked worker is started again."""
    order = ask(runtime_of(runtime_dir), "resume", workers=chosen(workers, everyone=everyone))
    return _done(_workers(order), None, json_output=json_output)


def release_device(
    workers: WorkersArgument = None,
    everyone: AllOption = False,
    timeout: TimeoutOption = 60.0,
    no_wait: NoWaitOption = False,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Let go of devices so that an operator can reset them: finish, end the process, close NVML; `resume` takes them back."""
    runtime = runtime_of(runtime_dir)
    order = ask(runtime, "release", workers=chosen(workers, everyone=everyone))
    if no_wait:
        return _done(_workers(order), "release ordered", json_output=json_output)
    progress = _wait(
        runtime, "release", lambda document: release_progress(document, _incarnations(order)), time.monotonic() + timeout
    )
    return _done(list(progress.workers), None, json_output=json_output)


def restart_worker(
    workers: WorkersArgument = None,
    everyone: AllOption = False,
    force: Annotated[bool, typer.Option("--force", help="Kill first; what the worker has runs again elsewhere.")] = False,
    timeout: TimeoutOption = 660.0,
    no_wait: NoWaitOption = False,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Drain, stop and start workers again, and wait until they are ready."""
    runtime = runtime_of(runtime_dir)
    order = ask(runtime, "restart", workers=chosen(workers, everyone=everyone), force=force)
    if no_wait:
        return _done(_workers(order), "restart ordered", json_output=json_output)
    progress = _wait(
        runtime, "restart", lambda document: restart_progress(document, _incarnations(order)), time.monotonic() + timeout
    )
    return _done(list(progress.workers), None, json_output=json_output)


def reload(json_output: JsonOption = False, runtime_dir: RuntimeDirOption = None) -> int:
    """Read the configuration again; a file with mistakes is refused and the old one stays in force."""
    runtime = runtime_of(runtime_dir)
    status_of(runtime)  # a pool that is not there, or stuck, is told in seconds; only a live one is worth the longer wait
    try:
        result = ask(runtime, "reload", timeout_s=_RELOAD_TIMEOUT_S)
    except Failure as failure:
        if failure.exit_code == Exit.UNREACHABLE and failure.code == "unreachable":
            raise Failure("timeout", failure.message, Exit.TIMEOUT) from None
        raise
    if json_output:
        print_json(result)
    elif isinstance(result, Mapping):
        for key, value in result.items():
            listed = ", ".join(map(str, value)) or "nothing" if isinstance(value, list) else value
            print_text(f"{key.replace('_', ' ')}: {listed}")
    return Exit.OK


def _wait(runtime: RuntimeDir, what: str, judge: Callable[[dict[str, Any]], Progress], deadline: float) -> Progress:
    """Look at the status until the order is settled.

    Raises:
        Failure: exit 1 when a worker will not arrive, 4 when time ran out, 3 when the pool went away.
    """
    try:
        while True:
            progress = judge(status_of(runtime))
            details = {"workers": list(progress.workers)}
            if progress.problems and (progress.settled or time.monotonic() >= deadline):
                raise Failure(f"{what}_failed", "; ".join(progress.problems), Exit.FAILED, **details)
            if progress.settled:
                return progress
            if (left := deadline - time.monotonic()) <= 0:
                names = ", ".join(map(str, progress.waiting))
                raise Failure("timeout", f"{what}: still waiting for worker {names}; it goes on", Exit.TIMEOUT, **details)
            time.sleep(min(_POLL_S, left))
    except KeyboardInterrupt:
        raise Failure("interrupted", f"no longer watching; the {what} goes on", INTERRUPTED) from None


def _workers(order: Any) -> list[dict[str, Any]]:
    """Check a verb's answer and return its workers."""
    try:
        return [{key: worker[key] for key in ("worker", "incarnation", "state")} for worker in order["workers"]]
    except (TypeError, KeyError):
        raise unreachable("bad_answer", "the pool's answer names no workers: is it of this version?") from None


def _incarnations(order: Any) -> dict[int, int]:
    return {worker["worker"]: worker["incarnation"] for worker in _workers(order)}


def _done(workers: list[dict[str, Any]], word: str | None, *, json_output: bool) -> int:
    if json_output:
        print_json({"workers": workers})
    else:
        for worker in workers:
            print_text(f"worker {worker['worker']}: {word or worker['state']}")
    return Exit.OK
