"""The stacks of one process of this host, by the best means at hand: py-spy from outside, else the signal that the process listens to.

py-spy needs no help of the process and sees a stopped one too, but the host must permit it (ptrace). The signal needs no permission beyond the
pool's own user, and a process that runs, if only in C code.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpupool.stack_dump import Listener, listener

#: What one process may tell; thousands of frames. The rest is cut off.
MAX_BYTES: Final = 256 << 10
_LOOK_S: Final = 0.01


class NoStacks(Exception):
    """None of the means worked; says why, for each."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """What was seen: `means` is "py-spy" or "signal"; `note` says why it was not py-spy, or what else is to be known."""

    pid: int
    means: str
    text: str
    truncated: bool
    note: str


def stacks_of(pid: int, file: Path, *, timeout_s: float, options: tuple[str, ...] = (), parent: int | None = None) -> Stacks:
    """Look at one process, within `timeout_s` for each means.

    Args:
        pid: the process.
        file: where it writes its stacks on a signal.
        timeout_s: how long each means may take.
        options: more options for py-spy; with any, there is no second means.
        parent: whose child it must be, if given: a pid may have gone to somebody else since it was learnt.

    Raises:
        NoStacks: saying what was tried.
    """
    try:
        process = os.pidfd_open(pid)
    except OSError as e:
        raise NoStacks(f"process {pid}: {e.strerror}") from None
    try:
        if parent is not None and (actual := _parent(pid)) != parent:
            raise NoStacks(f"process {pid} is not of this pool (any more): its parent is process {actual}, not {parent}")
        seen = _by_any_means(pid, file, timeout_s, options)
        # While the pidfd says that it lives its pid cannot be another's: what was seen between is its own.
        if select.select([process], [], [], 0)[0]:
            raise NoStacks(f"process {pid} ended meanwhile")
        return seen
    finally:
        os.close(process)


def _by_any_means(pid: int, file: Path, timeout_s: float, options: tuple[str, ...]) -> Stacks:
    is_stopped = _state(pid) in ("T", "t")
    try:
        text = _by_py_spy(pid, timeout_s, (*options, "--nonblocking") if is_stopped else options)
    except NoStacks as e:
        if options:
            raise
        why = str(e)
    else:
        return _bounded(pid, "py-spy", text, "the process is stopped (SIGSTOP)" if is_stopped else "")
    try:
        text, note = _by_signal(pid, file, timeout_s)
    except NoStacks as e:
        raise NoStacks(f"{why}; and {e}") from None
    return _bounded(pid, "signal", text, f"{why}{f'; {note}' if note else ''}")


def _bounded(pid: int, means: str, text: bytes, note: str) -> Stacks:
    return Stacks(pid, means, text[:MAX_BYTES].decode(errors="replace").rstrip(), len(text) > MAX_BYTES, note)


def _by_py_spy(pid: int, timeout_s: float, options: tuple[str, ...]) -> bytes:
    beside = Path(sys.executable).with_name("py-spy")  # a virtual environment that nobody activated
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        raise NoStacks("py-spy is not installed")
    # Into files: how much comes is bounded when it is read, and nobody waits for a full pipe.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                [program, "dump", "--pid", str(pid), *options], stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s, check=False
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NoStacks(f"py-spy did not end within {timeout_s:g} s") from None
        except OSError as e:
            raise NoStacks(f"py-spy cannot be started: {e.strerror}") from None
        out.seek(0)
        err.seek(0)
        if done.returncode:
            raise NoStacks(f"py-spy: {_reason(err.read(4096).decode(errors='replace'), done.returncode)}")
        return out.read(MAX_BYTES + 1)


def _reason(text: str, code: int) -> str:
    """Pick py-spy's reason from what it wrote: the first line, and the last of its causes."""
    lines = [line.strip() for line in text.partition("Stack backtrace")[0].splitlines() if line.strip()]
    causes = [line for line in lines[1:] if line[:1].isdigit()]
    words = [lines[0].removeprefix("Error: "), *(cause.partition(": ")[2] for cause in causes[-1:])] if lines else []
    return ": ".join(words) or f"exit code {code}"


def _by_signal(pid: int, file: Path, timeout_s: float) -> tuple[bytes, str]:
    """Send the signal and wait until the handler has returned."""
    deadline = time.monotonic() + timeout_s
    try:
        process = os.pidfd_open(pid)
    except OSError as e:
        raise NoStacks(f"process {pid}: {e.strerror}") from None
    try:
        with file.open("r+b", buffering=0) as dump:
            while True:  # one at a time: two would write into each other's lines
                try:
                    fcntl.flock(dump, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise NoStacks(f"another command still waits for the stacks of process {pid}") from None
                    time.sleep(_LOOK_S)
            ear = _ear(pid, file)
            before = _blocking(pid, ear.signal)
            os.ftruncate(dump.fileno(), ear.start)
            signal.pidfd_send_signal(process, ear.signal)
            return _written(pid, dump.fileno(), ear, before, deadline, timeout_s)
    except OSError as e:
        raise NoStacks(f"the signal: {e.strerror or e}{f': {e.filename}' if e.filename else ''}") from None
    finally:
        os.close(process)


def _ear(pid: int, file: Path) -> Listener:
    """Make sure that the process listens: to others the signal would be the end."""
    ear = listener(file)
    if ear is None or ear.pid != pid:
        raise NoStacks(f"process {pid} does not listen to a signal (yet)")
    if not ear.signal:
        raise NoStacks(f"process {pid} listens to no signal: its model has taken all that there are")
    _refuse_stopped(pid)
    if not _mask(Path(f"/proc/{pid}/status"), "SigCgt") >> (ear.signal - 1) & 1:
        raise NoStacks(f"process {pid} does not listen to signal {ear.signal} any more")
    return ear


def _written(pid: int, fd: int, ear: Listener, before: frozenset[int], deadline: float, timeout_s: float) -> tuple[bytes, str]:
    """Wait for the whole of it: a thread that is in the handler has the signal blocked."""
    while True:
        size = os.fstat(fd).st_size
        if size > ear.start and not _blocking(pid, ear.signal) - before:
            note = ""
            break
        _refuse_stopped(pid)
        if time.monotonic() > deadline:
            if size <= ear.start:
                state = _state(pid) or "gone"
                raise NoStacks(f"process {pid} (state {state}) did not answer signal {ear.signal} within {timeout_s:g} s")
            note = "perhaps not all of it"
            break
        time.sleep(_LOOK_S)
    return os.pread(fd, MAX_BYTES + 1, ear.start), note


def _refuse_stopped(pid: int) -> None:
    if (state := _state(pid)) in ("T", "t"):
        raise NoStacks(f"process {pid} is stopped (state {state}): no signal reaches it, and only py-spy can look into it")


def _blocking(pid: int, number: int) -> frozenset[int]:
    """Which threads have the signal blocked now."""
    tasks = Path(f"/proc/{pid}/task")
    with suppress(OSError):
        return frozenset(
            int(task.name) for task in tasks.iterdir() if _mask(task / "status", "SigBlk") >> (number - 1) & 1
        )  # fmt: skip
    return frozenset()


def _mask(status: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1], 16)
    return 0


def _state(pid: int) -> str:
    """Return the kernel's letter for what a process does, "" when it is gone."""
    return next(iter(_stat(pid)), "")


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    """Return /proc's fields of a process from its state on; none when it is gone."""
    with suppress(OSError):
        # The name before them is the process's own, and may hold anything.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    return []
