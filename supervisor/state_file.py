"""The file that carries what is kept over a restart: written whole or not at all, and read with distrust."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from .kept import Kept, Unreadable, parse, render

#: A real one has some hundred bytes per device.
_MAX_BYTES: Final = 1 << 20
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def state_path(environment: Mapping[str, str], runtime: Path, pool: str) -> Path:
    """Name the pool's file: in systemd's StateDirectory= where there is one, since a runtime directory may go with the service."""
    folder = environment.get("STATE_DIRECTORY", "").split(":")[0]
    return (Path(folder) if folder else runtime) / f"{pool.replace('/', '_')}.state.json"


def journal_path(environment: Mapping[str, str], runtime: Path, pool: str) -> Path:
    """Name the file of the pool's events, beside its state."""
    state = state_path(environment, runtime, pool)
    return state.with_name(f"{state.name.removesuffix('.state.json')}.events.jsonl")


def boot_id() -> str:
    """Identify this boot of the host; empty where it cannot be told."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def load(path: Path) -> tuple[Kept, str]:
    """Read the file; nothing kept if there is none.

    A file that cannot be understood is moved aside (".bad" behind its name) so that it can be looked at, and the second value says so.
    It never keeps the pool from starting.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return Kept(), ""
    except OSError as e:
        return Kept(), f"{path} cannot be read: {e.strerror}; drains and quarantines of the last run are not known"
    try:
        with os.fdopen(fd, "rb") as f:
            data = f.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise Unreadable(f"more than {_MAX_BYTES} bytes")
        return parse(data), ""
    except (OSError, Unreadable) as e:
        aside = path.with_name(path.name + ".bad")
        with suppress(OSError):
            path.replace(aside)
        return Kept(), f"{path} is not to be understood ({e}); moved to {aside.name}, nothing of it is used"


def save(path: Path, kept: Kept) -> None:
    """Write the file so that a crash at any moment leaves the old or the new one. Waits for the disk: not for an event loop.

    Raises:
        OSError: it cannot be written; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):
        temporary.unlink()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(render(kept))
            f.flush()
            os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
