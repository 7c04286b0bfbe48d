"""`gpupool profile WORKER`: what the next batches of a worker spend their time on, without stopping it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpupool.exits import Exit
from gpupool.visible import visible

from .control import ask, status_of, unreachable
from .options import JsonOption, RuntimeDirOption, runtime_of
from .output import Failure, print_json, print_text

#: The pool itself gives up first; how much later its answer may come.
_ANSWER_S: Final = 5.0
#: A batch that runs is waited for, and then the file is written.
_TAKING_S: Final = 120.0
_NAME_CHARS: Final = 60
_WHY: Final = {"time": "the time was up", "memory": "its records took too much of the worker's memory"}
_KIND: Final = {
    "torch": "torch's profiler",
    "python": "Python's profiler (the worker has not imported torch): functions, not operators",
}


def profile(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Slot number or device id.")],
    batches: Annotated[int, typer.Option("--batches", metavar="N", min=1, max=1000, help="How many batches to record.")] = 10,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.1, max=3600.0, help="End after so long, however few came.")
    ] = 30.0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Copy the file here too.")] = None,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Record a worker's next batches and show what they spent their time on.

    The file is a Chrome trace (gzip), for chrome://tracing or https://ui.perfetto.dev, in the runtime directory, and replaces the worker's last
    one. Without torch in the worker it is one for `python -m pstats`.
    """
    runtime = runtime_of(runtime_dir)
    if out is not None and not out.absolute().parent.is_dir():
        raise Failure("no_folder", f"{out}: there is no folder {out.absolute().parent}", Exit.USAGE)
    status_of(runtime)  # a pool that is not there, or stuck, is told in seconds; only a live one is worth the longer wait
    try:
        answer = ask(
            runtime, "profile", timeout_s=seconds + _TAKING_S + _ANSWER_S, worker=worker, batches=batches, seconds=seconds,
            within_s=_TAKING_S,
        )  # fmt: skip
    except Failure as failure:
        if failure.exit_code == Exit.UNREACHABLE and failure.code == "unreachable":
            raise Failure("timeout", failure.message, Exit.TIMEOUT) from None
        raise
    try:
        seen, ended, kind = int(answer["batches"]), str(answer["ended"]), str(answer["profiler"])
        lines = table(answer["operators"])
        file = None if answer["file"] is None else Path(answer["file"])
    except (TypeError, KeyError, ValueError):
        raise unreachable("bad_answer", "the pool's answer is no profile: is it of this version?") from None
    if file is None:
        raise Failure("no_batches", f"worker {worker} ran no batch within {seconds:g} s: nothing to profile", Exit.FAILED)
    if out is not None:
        try:
            shutil.copyfile(file, out)
        except OSError as e:
            raise Failure("not_copied", f"{e.filename}: {e.strerror}; it is still at {file}", Exit.FAILED) from None
        file = out
    if json_output:
        print_json({**answer, "file": str(file)})
    else:
        short = f" of {batches}, then {_WHY[ended]}" if ended in _WHY else ""
        print_text("\n".join([f"{seen} batches{short}, by {_KIND.get(kind, kind)}\n", *lines, f"\n{file}"]))
    return Exit.OK


def table(operators: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arrange operators as lines of text; times in milliseconds, of all batches together.

    Raises:
        KeyError, TypeError, ValueError: they are not what a worker of this version tells.
    """
    on_card = any(row["device_ms"] is not None for row in operators)
    head = f"{'':{_NAME_CHARS}} {'calls':>8} {'self ms':>11} {'total ms':>11}"
    lines = [f"{head} {'device ms':>11}" if on_card else head]
    for row in operators:
        name = visible(str(row["name"]))
        name = name if len(name) <= _NAME_CHARS else f"…{name[1 - _NAME_CHARS :]}"
        cells = f"{name:{_NAME_CHARS}} {int(row['calls']):>8} {float(row['self_ms']):>11.3f} {float(row['total_ms']):>11.3f}"
        lines.append(f"{cells} {float(row['device_ms'] or 0.0):>11.3f}" if on_card else cells)
    return lines
