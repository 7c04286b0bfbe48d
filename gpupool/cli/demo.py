"""`gpupool demo`: a pool on the machine at hand, with a real model on real input."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonOption


def demo(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="Text to search; default: one that comes along.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=64, help="How many. Default: one for each GPU, or two.", show_default=False),
    ] = None,
    json_output: JsonOption = False,
) -> int:
    """Start a pool here, run a real model on real input, print what came back and what it cost."""
    from gpupool.demo import run_demo  # late: everything

    return run_demo(file, json_output=json_output, workers=workers)
