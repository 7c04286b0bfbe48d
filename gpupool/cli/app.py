"""The table of commands, and the one way out: whatever happens becomes a message, an exit code and, where asked for, one JSON value."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer

from gpupool import __version__
from gpupool.exits import Exit

from .call import call
from .demo import demo
from .drill import drill
from .events import events
from .explain import explain
from .keygen import keygen
from .log_level import log_level
from .output import Failure, print_text, report
from .poison import app as poison
from .profile import profile
from .serve import check_config, serve
from .snapshot import snapshot
from .stacks import stacks
from .status import status
from .steer import drain, release_device, reload, restart_worker, resume
from .top import top

# Plain help and plain tracebacks: rich would cost each command its import, and a log is no place for boxes.
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (
    serve,
    check_config,
    status,
    drain,
    resume,
    restart_worker,
    release_device,
    reload,
    call,
    demo,
    drill,
    events,
    explain,
    keygen,
    log_level,
    snapshot,
    stacks,
    profile,
    top,
):
    app.command(command.__name__.replace("_", "-"))(command)
app.add_typer(poison, name="poison")


def _print_version(wanted: bool) -> None:
    if wanted:
        print_text(f"gpupool {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn this host's GPUs into a dependable inference pool."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code for the process."""
    given = sys.argv[1:] if arguments is None else arguments
    as_json = wants_json(given)
    try:
        code = app(given, prog_name="gpupool", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except Failure as failure:
        return _failed(failure, as_json=as_json)
    except KeyboardInterrupt:
        return _failed(Failure("interrupted", "interrupted", 130), as_json=as_json)
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        if _is_usage(error):
            return _failed(Failure("usage", _usage_text(error), Exit.USAGE), as_json=as_json)
        print_text(traceback.format_exc(), file=sys.stderr)
        return _failed(Failure("internal", f"{type(error).__name__}: {error}"), as_json=as_json)


def wants_json(arguments: list[str]) -> bool:
    """Whether failures belong on stdout as JSON too. Read by hand: it must be known even when the rest cannot be parsed."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options or options[:1] == ["call"]


def _failed(failure: Failure, *, as_json: bool) -> int:
    try:
        report(failure, as_json=as_json)
    except BrokenPipeError:
        return _reader_gone()
    return failure.exit_code


def _reader_gone() -> int:
    # Python flushes stdout once more at its end; without this that would complain on stderr.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.FAILED


def _is_usage(error: Exception) -> bool:
    # By what it can do, not by its class: which package that class lives in differs between versions of typer.
    return getattr(error, "exit_code", None) == Exit.USAGE and hasattr(error, "format_message")


def _usage_text(error: Any) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    return f"{error.format_message()}{hint}"
