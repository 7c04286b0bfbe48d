"""Did a SIGKILL come from the kernel's OOM killer? Told from the kernel's own count for the control group that we and our children share.

The exit status cannot tell: it is SIGKILL whoever sent it. The kernel counts its kills in the group's `memory.events` (version 2) or
`memory.oom_control` (version 1), and does so before it sends the signal, so the count has risen by the time the exit is seen.
A kill of somebody else in the group, such as a model's helper program, counts too; therefore a rise explains one exit, and only a recent one.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

#: The cause as the exit report tells it.
CAUSE: Final = "killed by the kernel's OOM killer"
#: How long after a rise an exit may be laid at its door: a process of many gigabytes takes seconds to go.
FRESH_S: Final = 10.0
_V1_FOLDER: Final = Path("sys/fs/cgroup/memory")
_V2_FOLDERS: Final = (Path("sys/fs/cgroup"), Path("sys/fs/cgroup/unified"))


def count_in(text: str) -> int | None:
    """Return the number of kills that `memory.events` or `memory.oom_control` tells; None where it tells none (before Linux 4.13)."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def candidates(membership: str) -> list[Path]:
    """Return where the count may stand, best first, by the text of /proc/self/cgroup; relative to the root of the file system.

    In a container the group's path may be another namespace's: then what is mounted at the top is ours.
    """
    groups = dict(line.split(":", 2)[1:] for line in membership.splitlines() if line.count(":") >= 2)
    files: list[Path] = []
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            files += [_V1_FOLDER / path.lstrip("/") / "memory.oom_control", _V1_FOLDER / "memory.oom_control"]
    if (unified := groups.get("")) is not None:
        files += [folder / unified.lstrip("/") / "memory.events" for folder in _V2_FOLDERS]
        files += [folder / "memory.events" for folder in _V2_FOLDERS]
    return list(dict.fromkeys(files))


class OomWatch:
    """Follows the count of the group that this process was in at the start.

    Args:
        root: what holds `proc` and `sys`; another one in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._file: Path | None = None
        self._last = self._unclaimed = 0
        self._risen_at = 0.0
        with suppress(OSError):
            for file in candidates((root / "proc/self/cgroup").read_text()):
                if (count := _read(root / file)) is not None:
                    self._file, self._last = root / file, count
                    break

    @property
    def available(self) -> bool:
        """Whether this kernel tells."""
        return self._file is not None

    def look(self, now: float) -> None:
        """Read the count; to be called now and then, so that it is known when it rose. `now`: monotonic seconds."""
        count = _read(self._file) if self._file is not None else None
        if count is None:
            return
        if self._unclaimed and now > self._risen_at + FRESH_S:
            self._unclaimed = 0
        if count > self._last:
            self._unclaimed += count - self._last
            self._risen_at = now
        self._last = count

    def claim(self, now: float) -> bool:
        """Whether a SIGKILL seen now was the OOM killer's. Each rise answers yes once."""
        self.look(now)
        if not self._unclaimed:
            return False
        self._unclaimed -= 1
        return True


def _read(file: Path) -> int | None:
    try:
        return count_in(file.read_text())
    except OSError:
        return None
