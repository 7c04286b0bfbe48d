"""`gpupool events`: what the pool did and why, from the running pool, or from the file that it left."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

from gpupool.exits import Exit
from gpupool.journal import KEPT, LEVELS, Wanted, newest, number
from gpupool.paths import RuntimeDir

from .control import ask
from .event_line import line_of
from .options import JsonOption, RuntimeDirOption, runtime_of
from .output import Failure, print_json, print_text

_POLL_S: Final = 0.5
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def events(
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", min=1, max=KEPT, help="How many, the newest.")] = 50,
    worker: Annotated[
        str | None, typer.Option(metavar="W", help="Of one worker: its slot number or device id.", show_default=False)
    ] = None,
    level: Annotated[str, typer.Option(metavar="LEVEL", help="As grave as that: info, warning or error.")] = "info",
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Not older than that: 90s, 10m, 3h, 2d.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And what comes, until Ctrl-C.")] = False,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Show what the pool did and why: faults, restarts, cards, limits, who asked for what. Also of a pool that is down."""
    if level not in LEVELS:
        raise typer.BadParameter(f"--level: {level!r} is none of {', '.join(LEVELS)}")
    runtime = runtime_of(runtime_dir)
    asked: dict[str, Any] = {"limit": count, "worker": worker, "level": level, "since_s": seconds(since)}
    try:
        found = _checked(runtime, ask(runtime, "events", **asked))
    except Failure as failure:
        if failure.exit_code != Exit.UNREACHABLE:
            raise
        found = _from_file(runtime, asked, failure)
    if json_output and not follow:
        print_json(found)
        return Exit.OK
    _show(found["events"], json_output=json_output)
    if found["dropped"]:
        print_text(f"gpupool: {found['dropped']} events could not be written to {found['file']}", file=sys.stderr)
    if follow:
        _follow(runtime, {**asked, "limit": KEPT, "since_s": None}, found["last"], json_output=json_output)
    elif not found["events"]:
        print_text("gpupool: no such events", file=sys.stderr)
    return Exit.OK


def seconds(text: str | None) -> float | None:
    """Read a length of time: a number with s, m, h or d behind it.

    Raises:
        typer.BadParameter: it is none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r}: expected a time like 90s, 10m, 3h or 2d")
    return float(match[1]) * _UNITS[match[2]]


def _from_file(runtime: RuntimeDir, asked: dict[str, Any], failure: Failure) -> dict[str, Any]:
    """Read what the last pool of this runtime directory wrote.

    Raises:
        Failure: there is no such file, or it cannot be read; then that no pool runs is the answer.
    """
    from gpupool.journal_file import find, read  # late: mostly a pool answers

    path = find(runtime.path)
    try:
        events = None if path is None else read(path)
    except OSError as e:
        raise Failure(failure.code, f"{failure.message}; and {path}: {e.strerror or e}", Exit.UNREACHABLE) from None
    if events is None:
        raise Failure(failure.code, f"{failure.message}; it has left no events either", Exit.UNREACHABLE)
    print_text(f"gpupool: {failure.message}; these are from {path}", file=sys.stderr)
    since = 0.0 if asked["since_s"] is None else time.time() - asked["since_s"]
    found = newest(events, Wanted(asked["worker"], asked["level"], since), asked["limit"])
    last = max(map(number, events), default=0)
    return {"events": found, "last": last, "dropped": 0, "file": str(path), "running": False}


def _checked(runtime: RuntimeDir, answer: Any) -> dict[str, Any]:
    if isinstance(answer, dict) and isinstance(answer.get("events"), list) and isinstance(answer.get("last"), int):
        return {"dropped": 0, "file": None, **answer, "running": True}
    raise Failure("bad_answer", f"what answers at {runtime.control} sent no events: is it of this version?", Exit.UNREACHABLE)


def _follow(runtime: RuntimeDir, asked: dict[str, Any], last: int, *, json_output: bool) -> None:
    """Print what comes; a pool that goes away is waited for, since its end is what one wants to see on."""
    away = False
    try:
        while True:
            time.sleep(_POLL_S)
            try:
                answer = _checked(runtime, ask(runtime, "events", **asked, after=last))
            except Failure as failure:
                if failure.exit_code != Exit.UNREACHABLE:
                    raise
                if not away:
                    print_text(f"gpupool: {failure.message}; waiting for it", file=sys.stderr)
                away = True
                continue
            away, last = False, answer["last"]
            _show(answer["events"], json_output=json_output)
    except KeyboardInterrupt:
        return


def _show(events: Iterable[dict[str, Any]], *, json_output: bool) -> None:
    for event in events:
        print_json(event) if json_output else print_text(line_of(event))
