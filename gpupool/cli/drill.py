"""`gpupool drill`: do a fault to one worker on purpose, and print what clients saw and how long each step took."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from gpupool.exits import Exit

from .control import ask, status_of, unreachable
from .options import JsonOption, RuntimeDirOption, positive, runtime_of
from .output import Failure, print_json, print_text

#: The pool itself ends the drill when its time is up; how much later its answer may come.
_ANSWER_S: Final = 5.0
_TOLD: Final = {
    "kill": "kills it (SIGKILL)",
    "freeze": "stops it without ending it (SIGSTOP)",
    "hang": "lets its next batch never end",
    "oom": "kills it as the kernel's OOM killer would (SIGKILL; no memory is used up)",
}


class Kind(StrEnum):
    """The faults that can be drilled."""

    KILL = "kill"
    FREEZE = "freeze"
    HANG = "hang"
    OOM = "oom"


def drill(
    kind: Annotated[Kind, typer.Argument(help="The fault.")],
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Slot number or device id.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even the only ready worker, or one that will be parked for it.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", callback=positive, help="Seconds to follow it; what was done stands.")
    ] = 180.0,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Do a fault to a worker on purpose and report what clients saw.

    Every reply given meanwhile counts, whoever is to blame for it, and to the restart limits the drill is a death like any other. Exit code
    0: no request failed and the pool is as before; 1: some failed; 4: the pool was not as before when time was up.
    """
    runtime = runtime_of(runtime_dir)
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("this does harm on purpose and nobody is there to be asked: give --yes")
        question = f"This {_TOLD[kind]}: worker {worker} of the pool at {runtime.control.parent}. Go on?"
        if not typer.confirm(question, err=True):
            raise Failure("declined", "nothing was done")
    status_of(runtime)  # a pool that is not there, or stuck, is told in seconds; only a live one is worth the longer wait
    try:
        report = ask(
            runtime, "drill", timeout_s=timeout + _ANSWER_S, worker=worker, kind=str(kind), force=force, within_s=timeout
        )
    except Failure as failure:
        if failure.exit_code == Exit.UNREACHABLE and failure.code == "unreachable":
            raise Failure("timeout", failure.message, Exit.TIMEOUT) from None
        raise
    try:
        text, failed, back = _text(report), sum(report["failed"].values()), bool(report["back"])
    except (TypeError, KeyError, AttributeError):
        raise unreachable("bad_answer", "the pool's answer is no drill report: is it of this version?") from None
    if not json_output:
        print_text(text)
    if not back:
        raise Failure(
            "timeout", f"the pool is not as before; worker {report['worker']} is {report['state']}", Exit.TIMEOUT, report=report
        )
    if failed:
        raise Failure("requests_failed", f"{failed} requests failed", Exit.FAILED, report=report)
    if json_output:
        print_json(report)
    return Exit.OK


def _text(report: Mapping[str, Any]) -> str:
    """Put a report into lines for people."""
    replied = sum(report["replied"].values())
    failed = ", ".join(f"{n} {code}" for code, n in report["failed"].items()) or "none"
    cause = (report["last_exit"] or {}).get("cause", "it did not end")
    lines = [
        ("drill", f"{report['kind']}, worker {report['worker']}, incarnation {report['incarnation']}: {cause}"),
        ("noticed", _seconds(report["detected_s"])),
        (
            "its requests elsewhere",
            "at the latest " + _seconds(report["redispatched_s"]) if report["redispatched"] else "it had none",
        ),
        ("worker ready again", _seconds(report["ready_s"])),
        ("limits as before", _seconds(report["full_capacity_s"])),
        ("requests", f"{replied} answered, {report['redispatched']} of them run again; failed: {failed}"),
    ]
    if report.get("router_restarted"):
        lines.append(("note", "the router was replaced meanwhile: counts are those of the new one"))
    return "\n".join(f"{name + ':':24}{value}" for name, value in lines)


def _seconds(value: float | None) -> str:
    return "not in time" if value is None else f"after {value:.3f} s"
