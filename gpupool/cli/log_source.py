"""Where a log is read from: a file with the older ones beside it, a pipe, or the host's journal; as blocks of bytes, the oldest first."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from .output import Failure

if TYPE_CHECKING:
    import gzip

_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """One log; `name` is for people. Reading it raises Failure when it cannot be read."""

    name: str
    files: tuple[Path, ...] = ()
    command: tuple[str, ...] = ()

    def blocks(self) -> Iterator[bytes]:
        """Yield the log's bytes."""
        if self.command:
            yield from _output_of(self.command)
        elif not self.files:
            yield from _of(sys.stdin.buffer)
        for path in self.files:
            try:
                with closing(_open(path)) as f:
                    yield from _of(f)
            except FileNotFoundError:
                if path == self.files[-1]:
                    raise Failure("no_log", f"there is no log at {path}") from None
            except (OSError, EOFError, zlib.error) as e:
                raise Failure("no_log", f"{path} cannot be read: {e}") from None


def standard_input() -> Source:
    """Read what is piped in."""
    return Source("standard input")


def log_files(path: Path) -> Source:
    """Read a file and, before it, those that it was rotated into: FILE.1, FILE.2.gz, FILE-20261130 and such."""
    turned = re.compile(re.escape(path.name) + r"[.-]\d+(\.gz)?")
    try:
        beside = [p for p in path.parent.iterdir() if turned.fullmatch(p.name) and p.is_file()]
        older = sorted(beside, key=lambda p: p.stat().st_mtime)
    except OSError:
        older = []
    return Source(" and ".join(map(str, (*older, path))), (*older, path))


def journal(unit: str, since: str) -> Source:
    """Read what the host's journal has of a unit; `since` as journalctl takes it."""
    command = ("journalctl", "--quiet", "--no-pager", "-u", unit, "-o", "cat", "--since", since)
    return Source(f"the journal of {unit} since {since}", command=command)


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
