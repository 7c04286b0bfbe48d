"""The options that several commands share, and what they mean together."""

from __future__ import annotations

from typing import Annotated

import typer

from gpupool.paths import ENV_DIR, RuntimeDir, find_runtime_dir

RuntimeDirOption = Annotated[
    str | None,
    typer.Option(
        "--runtime-dir", metavar="DIR", help=f"Where the pool keeps its sockets (also ${ENV_DIR}).", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
WorkersArgument = Annotated[
    list[str] | None, typer.Argument(metavar="WORKER…", help="Slot numbers or device ids.", show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="Every worker.")]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Return once the pool has taken the order.")]


def runtime_of(flag: str | None) -> RuntimeDir:
    """Find the pool that a command means."""
    return find_runtime_dir(flag)


def chosen(workers: list[str] | None, *, everyone: bool) -> list[str] | None:
    """Return which workers a command means, None for all; one of the two ways to say it must be used."""
    if bool(workers) == everyone:
        raise typer.BadParameter("give either WORKER… or --all")
    return None if everyone else workers


def positive(value: float) -> float:
    """Check a time in seconds."""
    if not 0 < value <= 86400:
        raise typer.BadParameter("it must be more than 0 and at most 86400 seconds")
    return value
