"""`gpupool snapshot WORKER`: what a worker allocates and keeps, without stopping it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpupool.exits import Exit

from .control import ask, status_of, unreachable
from .options import JsonOption, RuntimeDirOption, runtime_of
from .output import Failure, print_json, print_text

#: The pool itself gives up first; how much later its answer may come.
_ANSWER_S: Final = 5.0
#: A batch that runs is waited for, and then the file is written.
_TAKING_S: Final = 120.0


def snapshot(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Slot number or device id.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Copy it here too; on a card FILE.pickle as well.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.0, max=3600.0, help="How long to trace; costs while it lasts.")
    ] = 10.0,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Trace a worker's allocations for a while and write down what it still holds of them.

    The file is JSON, in the runtime directory, and replaces the worker's last one. On a card torch's allocator history comes beside it, for
    https://pytorch.org/memory_viz.
    """
    runtime = runtime_of(runtime_dir)
    if out is not None and not out.absolute().parent.is_dir():
        raise Failure("no_folder", f"{out}: there is no folder {out.absolute().parent}", Exit.USAGE)
    status_of(runtime)  # a pool that is not there, or stuck, is told in seconds; only a live one is worth the longer wait
    try:
        answer = ask(
            runtime, "snapshot", timeout_s=seconds + _TAKING_S + _ANSWER_S, worker=worker, seconds=seconds, within_s=_TAKING_S
        )
    except Failure as failure:
        if failure.exit_code == Exit.UNREACHABLE and failure.code == "unreachable":
            raise Failure("timeout", failure.message, Exit.TIMEOUT) from None
        raise
    try:
        files = [Path(name) for name in answer["files"]]
        held, places = int(answer["allocated_and_held_bytes"]), int(answer["places"])
    except (TypeError, KeyError, ValueError):
        raise unreachable("bad_answer", "the pool's answer names no files: is it of this version?") from None
    result: dict[str, Any] = {**answer, "files": [str(file) for file in files]}
    if out is not None:
        copies = [out, out.with_name(f"{out.name}.pickle")][: len(files)]
        try:
            for file, copy in zip(files, copies, strict=True):
                shutil.copyfile(file, copy)
        except OSError as e:
            raise Failure("not_copied", f"{e.filename}: {e.strerror}; it is still at {files[0]}", Exit.FAILED) from None
        result["files"] = [str(copy) for copy in copies]
    if json_output:
        print_json(result)
    else:
        print_text(f"{held / 2**20:.1f} MiB allocated in {seconds:g} s and still held, at {places} places")
        for name in result["files"]:
            print_text(name)
    return Exit.OK
