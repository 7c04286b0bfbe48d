"""`gpupool stacks WORKER`: what each thread of a process of the pool is at right now, without stopping it."""

from __future__ import annotations

import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpupool.exits import Exit
from gpupool.paths import RuntimeDir

from .control import status_of, unreachable
from .options import JsonOption, RuntimeDirOption, positive, runtime_of
from .output import Failure, print_json, print_text
from .process_stacks import NoStacks, Stacks, stacks_of

#: How long connecting to the supervisor's socket may take; the kernel answers, whatever the supervisor does.
_CONNECT_S: Final = 2.0
#: No process has this pid: nothing is a child of a supervisor that does not say who it is.
_NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class Target:
    """One process: how people call it, its pid, the file that it writes its stacks into on a signal, and whose child it must be."""

    name: str
    pid: int
    file: Path
    parent: int | None = None


def stacks(
    worker: Annotated[
        str | None, typer.Argument(metavar="WORKER", help="Slot number or device id.", show_default=False)
    ] = None,
    router: Annotated[bool, typer.Option("--router", help="The router instead.")] = False,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="The supervisor instead; also when it answers no more.")
    ] = False,
    local_values: Annotated[
        bool, typer.Option("--locals", help="Values of local variables too (py-spy): they may hold clients' data.")
    ] = False,
    native: Annotated[bool, typer.Option("--native", help="Frames of C code too (py-spy).")] = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", callback=positive, help="For each means.")] = 10.0,
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Show the stacks of all threads of a worker, of the router or of the supervisor.

    By py-spy, where it is installed and permitted; else by a signal, on which the process writes them down itself.
    """
    if (worker is not None) + router + supervisor != 1:
        raise typer.BadParameter("give one of WORKER, --router and --supervisor")
    runtime = runtime_of(runtime_dir)
    target = _supervisor(runtime) if supervisor else target_of(status_of(runtime), runtime, worker)
    options = (*(("--locals",) if local_values else ()), *(("--native",) if native else ()))
    seen = look(target, timeout_s=timeout, options=options)
    if json_output:
        print_json({"process": target.name, **asdict(seen)})
    else:
        print_text(f"{headline(target, seen)}\n\n{seen.text}")
        if seen.truncated:
            print_text("… and more, cut off here")
    return Exit.OK


def look(target: Target, *, timeout_s: float, options: tuple[str, ...] = ()) -> Stacks:
    """Look at a process.

    Raises:
        Failure: no means worked; the message says what was tried.
    """
    try:
        return stacks_of(target.pid, target.file, timeout_s=timeout_s, options=options, parent=target.parent)
    except NoStacks as e:
        raise Failure("no_stacks", f"{target.name}: {e}", Exit.FAILED) from None


def headline(target: Target, seen: Stacks) -> str:
    """Say whose stacks they are and by which means they were seen."""
    return f"{target.name}, pid {seen.pid}, by {seen.means}{f' ({seen.note})' if seen.note else ''}"


def target_of(document: dict[str, Any], runtime: RuntimeDir, name: str | None) -> Target:
    """Find a worker by its slot number or device id, the router by None.

    Raises:
        Failure: there is no such worker, or it has no process now.
    """
    if name is None:
        pid, words = (document.get("router") or {}).get("pid"), "the router"
        file = runtime.stacks("router")
    else:
        workers = document["workers"]
        found = [w for w in workers if str(w["worker"]) == name or (w.get("device") or {}).get("id") == name]
        if not found:
            known = ", ".join(f"{w['worker']} ({(w.get('device') or {}).get('id')})" for w in workers)
            raise Failure("unknown_worker", f"no worker {name!r}; there are {known}", Exit.FAILED)
        pid, words = found[0].get("pid"), f"worker {found[0]['worker']}"
        file = runtime.stacks(f"worker-{found[0]['worker']}")
    if not isinstance(pid, int):
        raise Failure("no_process", f"{words} has no process now", Exit.FAILED)
    return Target(words, pid, file, document["pool"].get("pid", _NOBODY))


def _supervisor(runtime: RuntimeDir) -> Target:
    """Ask the kernel who listens on the control socket: one that hangs need not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(str(runtime.control))
            pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError as e:
            raise unreachable("unreachable", f"no pool can be reached at {runtime.control}: {e.strerror or e}") from None
    return Target("the supervisor", pid, runtime.stacks("supervisor"))
