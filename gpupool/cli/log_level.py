"""`gpupool log-level`: how much a component of a running pool logs, for a while."""

from __future__ import annotations

from typing import Annotated

import typer

from gpupool.exits import Exit

from .control import ask
from .options import JsonOption, RuntimeDirOption, runtime_of
from .output import print_json, print_text


def log_level(
    component: Annotated[str, typer.Argument(metavar="COMPONENT", help="supervisor, router, worker, or one WORKER.")],
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="debug, info, warning, error, or default: as configured.")],
    for_s: Annotated[float, typer.Option("--for", metavar="S", help="Seconds until it falls back; 0: it stays.")] = 600.0,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Change the log level of a component at run time. It falls back by itself after --for seconds."""
    answer = ask(runtime_of(runtime_dir), "log_level", component=component, level=level, for_s=for_s)
    if json_output:
        print_json(answer)
    elif level == "default":
        print_text(f"{component}: as configured")
    else:
        print_text(f"{component}: {level}, {f'for {for_s:g} s' if for_s else 'until further notice'}")
    return Exit.OK
