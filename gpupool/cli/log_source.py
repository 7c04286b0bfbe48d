"""Where a log is read from: a file with the older ones beside it, a pipe, or the host's journal; as blocks of bytes, the oldest first."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from .output import Failure, print_text

if TYPE_CHECKING:
    import gzip

_BLOCK_BYTES: Final = 1 << 20
#: So often may a file be another when it is opened than when it was listed; more is no rotation.
_MOST_RENAMED: Final = 100


@dataclass(frozen=True, slots=True)
class Source:
    """One log; `name` is for people. Reading it raises Failure when it cannot be read."""

    name: str
    file: Path | None = None
    command: tuple[str, ...] = ()

    def blocks(self) -> Iterator[bytes]:
        """Yield the log's bytes."""
        if self.command:
            yield from _output_of(self.command)
        elif self.file:
            yield from _of_files(self.file)
        else:
            yield from _of(sys.stdin.buffer)


def standard_input() -> Source:
    """Read what is piped in."""
    return Source("standard input")


def log_files(path: Path) -> Source:
    """Read a file and, before it, those that it was rotated into: FILE.1, FILE.2.gz, FILE-20261130 and such."""
    return Source(" and ".join(str(one.path) for one in _listed(path)) or str(path), path)


def journal(unit: str, since: str) -> Source:
    """Read what the host's journal has of a unit; `since` as journalctl takes it."""
    command = ("journalctl", "--quiet", "--no-pager", "-u", unit, "-o", "cat", "--since", since)
    return Source(f"the journal of {unit} since {since}", command=command)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    inode: tuple[int, int]
    changed_ns: int


def _listed(path: Path) -> list[_File]:
    """List the files of a log, the oldest first; what cannot be looked at is left out."""
    turned = re.compile(re.escape(path.name) + r"[.-]\d+(\.gz)?")
    try:
        beside = {one for one in path.parent.iterdir() if turned.fullmatch(one.name)}
    except OSError:
        beside = set()
    found = []
    for one in (*beside, path):
        if one.suffix == ".gz" and one.with_suffix("") in beside:  # being packed: what is packed first is not all of it
            continue
        with suppress(OSError):
            status = one.stat()
            if one == path or stat.S_ISREG(status.st_mode):
                found.append(_File(one, (status.st_dev, status.st_ino), status.st_mtime_ns))
    mine = {one.inode for one in found if one.path == path}  # a link may lead to one of those beside it
    return sorted(
        (one for one in found if one.path == path or one.inode not in mine), key=lambda one: (one.path == path, one.changed_ns)
    )


def _of_files(path: Path) -> Iterator[bytes]:
    """Yield what a log's files hold. They are listed again after each: meanwhile they are renamed, packed and removed.

    What appears meanwhile counts only if it is younger than what was read: else it is that, packed.
    """
    first = {one.inode for one in _listed(path)}
    read: set[tuple[int, int]] = set()
    reached_ns = renamed = 0
    while one := next(
        (x for x in _listed(path) if x.inode not in read and (x.inode in first or x.changed_ns > reached_ns)), None
    ):
        try:
            with closing(_open(one.path)) as f:
                status = os.fstat(f.fileno())
                if (status.st_dev, status.st_ino) != one.inode and renamed < _MOST_RENAMED:
                    renamed += 1
                    continue  # and it is listed under its new name
                read.add(one.inode)
                reached_ns = max(reached_ns, one.changed_ns)
                yield from _of(f)
        except FileNotFoundError:
            if (renamed := renamed + 1) > _MOST_RENAMED:
                raise Failure("no_log", f"{one.path} is there and cannot be found") from None
        except (OSError, EOFError, zlib.error) as e:
            if one.path == path:
                raise Failure("no_log", f"{path} cannot be read: {e}") from None
            print_text(f"gpupool: {one.path} is left out, as far as it cannot be read: {e}", file=sys.stderr)
            read.add(one.inode)
            yield b"\n"  # a line that breaks off there is not to spoil the next file's first
        if one.path == path and one.inode in read:
            return
    try:
        path.stat()
    except FileNotFoundError:
        raise Failure("no_log", f"there is no log at {path}") from None
    except OSError as e:
        raise Failure("no_log", f"{path} cannot be read: {e}") from None


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    f = path.open("rb")
    if f.read(2) == b"\x1f\x8b":
        import gzip  # late: most logs are not

        f.close()
        return gzip.open(path, "rb")
    f.seek(0)
    return f


def _of(f: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while block := f.read(_BLOCK_BYTES):
        yield block


def _output_of(command: tuple[str, ...]) -> Iterator[bytes]:
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
    except OSError as e:
        raise Failure("no_log", f"{command[0]} cannot be started: {e.strerror}") from None
    assert process.stdout is not None
    try:
        yield from _of(process.stdout)
    except GeneratorExit:
        process.kill()
        raise
    finally:
        process.stdout.close()
        code = process.wait()
    if code:
        raise Failure("no_log", f"`{' '.join(command)}` failed with exit code {code}")
