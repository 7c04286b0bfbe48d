"""`gpupool poison list|clear`: the request contents that have killed workers and are refused, and letting them pass again."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Final

import typer

from gpupool.exits import Exit
from gpupool.visible import visible

from .control import ask, status_of, unreachable
from .options import JsonOption, RuntimeDirOption, runtime_of
from .output import Failure, print_json, print_text

#: Where nobody looks at a terminal, a hash must not be folded.
_WIDE: Final = 200

app = typer.Typer(
    help="Request contents that have killed workers twice and are refused for a while.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command("list")
def show(json_output: JsonOption = False, runtime_dir: RuntimeDirOption = None) -> int:
    """Show what is refused: hash, model, size, deaths, for how long yet, and how often it came again. The newest 50."""
    router = status_of(runtime_of(runtime_dir))["router"]
    if "poison" not in router:
        raise Failure("no_books", "the router has not told its books yet: it has just started, or does not answer")
    entries: list[dict[str, Any]] = router.get("poison", [])
    if json_output:
        print_json({"poisoned": router.get("poisoned", 0), "poison": entries})
        return Exit.OK
    if not entries:
        print_text("nothing is refused as poison")
        return Exit.OK
    from rich.console import Console  # late: the other commands start faster without
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("hash", no_wrap=True)
    for heading in ("model", "bytes", "worker deaths", "since", "expires in", "refused"):
        table.add_column(heading, overflow="fold")
    for e in entries:
        ages = (f"{e['age_s']:.0f} s", f"{e['expires_in_s']:.0f} s")
        cells = (e["hash"], e["model"], e["input_bytes"], e["worker_deaths"], *ages, e["refused"])
        table.add_row(*(Text(visible(str(cell))) for cell in cells))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)
    return Exit.OK


@app.command()
def clear(
    hashes: Annotated[list[str] | None, typer.Argument(metavar="HASH…", help="Their first digits are enough.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Let contents pass again: after the model was mended, say. What still kills is refused again after two more deaths."""
    if bool(hashes) == everything:
        raise typer.BadParameter("give hashes, or --all")
    for prefix in hashes or []:
        if not re.fullmatch("[0-9a-f]{1,32}", prefix):
            raise typer.BadParameter(f"{prefix!r} is no beginning of a hash: up to 32 digits of 0-9a-f")
    runtime = runtime_of(runtime_dir)
    cleared = 0
    for prefix in hashes or [""]:
        answer = ask(runtime, "clear_poison", hash=prefix)
        try:
            cleared += int(answer["cleared"])
        except (TypeError, KeyError, ValueError):
            raise unreachable("bad_answer", "the pool's answer has no count: is it of this version?") from None
    if json_output:
        print_json({"cleared": cleared})
    else:
        print_text(f"cleared: {cleared}")
    return Exit.OK
