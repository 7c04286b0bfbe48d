"""Where this process's log ends up, as far as it can tell: for commands that read it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def log_file(configured: str) -> str | None:
    """Name the file: the configured one, else the one that stderr was sent to."""
    if configured:
        return str(Path(configured).absolute())
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            path = Path("/proc/self/fd/2").readlink()
            return str(path) if path.exists() else None
    return None


def journal_unit(environment: Mapping[str, str]) -> str | None:
    """Name the systemd unit under which the log is in the host's journal, when stderr leads there."""
    with suppress(OSError):
        there = os.fstat(2)
        if environment.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}":
            return unit_of(Path("/proc/self/cgroup").read_text())
    return None


def unit_of(cgroup: str) -> str | None:
    """Find the unit in the text of /proc/PID/cgroup."""
    for line in cgroup.splitlines():
        for part in reversed(line.rpartition(":")[2].split("/")):
            if part.endswith((".service", ".scope")):
                return part
    return None
