"""`gpupool status`: the supervisor's document as it is for programs, a table for people, and a verdict as exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpupool.exits import Exit
from gpupool.visible import visible

from .control import status_of
from .options import JsonOption, RuntimeDirOption, runtime_of
from .output import print_json
from .waiting import text_of

if TYPE_CHECKING:
    from rich.console import Console, Group

_REDRAW_S: Final = 1.0
#: Where nobody looks at a terminal, lines must not be folded.
_WIDE: Final = 250


def status(
    json_output: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until Ctrl-C; one JSON value a line.")] = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Show the pool, the router and each worker. Exit 0: ready with all workers, 5: not ready, 6: degraded."""
    runtime = runtime_of(runtime_dir)
    document = status_of(runtime)
    if not watch:
        if json_output:
            print_json(document)
        else:
            _console().print(layout(document))
        return verdict(document)
    try:
        if json_output or not sys.stdout.isatty():
            while True:
                print_json(document) if json_output else _console().print(layout(document))
                time.sleep(_REDRAW_S)
                document = status_of(runtime)
        from rich.live import Live  # late: only here, for a terminal

        with Live(layout(document), console=_console(), auto_refresh=False) as live:
            while True:
                time.sleep(_REDRAW_S)
                document = status_of(runtime)
                live.update(layout(document), refresh=True)
    except KeyboardInterrupt:
        return verdict(document)


def verdict(document: Mapping[str, Any]) -> int:
    """Return the exit code that a status document stands for."""
    pool = document["pool"]
    if not pool["ready"]:
        return Exit.NOT_READY
    return Exit.DEGRADED if pool["degraded"] else Exit.OK


def layout(document: Mapping[str, Any]) -> Group:
    """Arrange a status document for people: a line for the pool, one for the router, a row for each worker."""
    from rich.console import Group  # late: a program that asks for JSON does not pay for it
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, *_ in _COLUMNS:
        table.add_column(heading, no_wrap=True)
    table.add_column("why")
    for worker in document["workers"]:
        cells = [Text(visible(_cell(worker, path, unit))) for _, path, unit in _COLUMNS]
        cells.append(Text(visible(_why(worker))))
        cells[1].stylize(_STATE_STYLE.get(worker["state"], "yellow"))
        table.add_row(*cells)
    lines = [_pool_line(document["pool"]), _router_line(document.get("router") or {}), *_log_lines(document)]
    return Group(*(Text(visible(line)) for line in lines), table)


#: Heading, where it stands in a worker's entry, unit.
_COLUMNS: Final = (
    ("worker", "worker", ""),
    ("state", "state", ""),
    ("pid", "pid", ""),
    ("device", "device.id", ""),
    ("health", "device.health", ""),
    ("queue", "queue_length", ""),
    ("running", "running", ""),
    ("in flight", "in_flight", ""),
    ("limit", "batch_limit", ""),
    ("window", "window_ms", " ms"),
    ("restarts", "restarts", ""),
    ("beat", "heartbeat_age_ms", " ms"),
)
_STATE_STYLE: Final = {
    "ready": "green",
    "parked": "red",
    "quarantined": "red",
    "lost": "red",
    "unkillable": "red",
}


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False, emoji=False)


def _pool_line(pool: Mapping[str, Any]) -> str:
    words = [
        f"pool {pool.get('name')}: {pool.get('state')}{', degraded' if pool['degraded'] else ''}",
        f"{pool.get('workers_ready')} of {pool.get('workers_configured')} workers ready",
        f"batch x{pool.get('batch_factor')}, window x{pool.get('window_factor')}",
        f"pid {pool.get('pid')}, up {_duration(pool.get('uptime_s'))}, version {pool.get('version')}",
    ]
    if error := pool.get("last_reload_error"):
        words.append(f"last reload refused: {error}")
    return "; ".join(words)


def _router_line(router: Mapping[str, Any]) -> str:
    by_code = router.get("replied_total") or {}
    replies = ", ".join(f"{code} {count}" for code, count in by_code.items()) or "none"
    poisoned = f"; {router['poisoned']} refused as poison" if router.get("poisoned") else ""
    return (
        f"router: {router.get('state')} at {', '.join(router.get('bind') or ['?'])}; pending {router.get('pending')}, "
        f"in flight {router.get('in_flight')}; accepted {router.get('accepted_total')}, replied: {replies}{poisoned}"
    )


def _log_lines(document: Mapping[str, Any]) -> list[str]:
    """Log levels that are not as configured: they cost, and are easily forgotten. And what could not be written or sent."""
    logs = document.get("logs") or {}
    asked = [
        f"{wish['component']} {wish['level']} "
        + ("until further notice" if wish["for_s"] is None else f"for {wish['for_s']:.0f} s")
        for wish in logs.get("asked", ())
    ]
    lines = [f"log level: {', '.join(asked)}"] if asked else []
    told = {"supervisor": logs.get("supervisor"), "router": (document.get("router") or {}).get("log")}
    told |= {f"worker {worker['worker']}": worker.get("log") for worker in document["workers"]}
    for name, log in told.items():
        if losses := (log or {}).get("losses"):
            lines.append(
                f"log: {name} lost {', '.join(f'{count} {level}' for level, count in losses.items())}: nowhere to write"
            )
    ways = {name: log["forwarding"] for name, log in told.items() if log and log.get("forwarding")}
    if down := {name: way for name, way in ways.items() if not way["up"]}:
        waiting, lost = (sum(way[key] for way in ways.values()) for key in ("waiting", "dropped"))
        places = ", ".join(sorted({way.get("address", "?") for way in down.values()}))
        lines.append(f"log: Fluentd at {places} takes nothing from {', '.join(down)}; {waiting} records wait, {lost} lost")
    return lines


def _cell(worker: Mapping[str, Any], path: str, unit: str) -> str:
    value: Any = worker
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    if value is None:
        return "-"
    return f"{value:g}{unit}" if isinstance(value, float) else f"{text_of(value)}{unit}"


def _why(worker: Mapping[str, Any]) -> str:
    """What an engineer asks first: why it is in this state, what its card needs, how its last process ended."""
    device = worker.get("device") or {}
    parts = []
    if reason := worker.get("reason") or device.get("reason"):
        parts.append(str(reason))
    if needs := device.get("needs"):
        parts.append(f"needs {needs}")
    if worker.get("late"):
        parts.append("its beat is missing")
    if count := worker.get("oom_total"):
        parts.append(f"ran out of memory {count} time{'s' if count > 1 else ''}")
    parts += [f"its {kind} memory rises: a leak?" for kind, leak in (worker.get("leak") or {}).items() if leak.get("suspected")]
    last = worker.get("last_exit")
    if last and (cause := text_of(last)) not in parts:
        parts.append(f"last exit: {cause}")
    return "; ".join(parts) or "-"


def _duration(seconds: Any) -> str:
    if not isinstance(seconds, (int, float)):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
