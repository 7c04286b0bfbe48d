"""A memory limit for a pool: a control group below our own, so that the kernel's OOM killer really strikes, and only there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.running import GPUPOOL, RunningPool

#: Several times what a pool of two toy workers takes.
LIMIT_BYTES = 640 << 20


@contextlib.contextmanager
def memory_group(limit_bytes: int = LIMIT_BYTES) -> Iterator[Path]:
    """Make a group and take it away afterwards; its processes must be gone by then.

    Raises:
        OSError: where it cannot be made: no right, no controller, a read-only file system.
    """
    group = _own_group() / f"gpupool-drill-{os.getpid()}"
    group.mkdir()
    try:
        limit = next((group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists()), None)
        if limit is None:
            raise OSError("the memory controller is not given to groups below ours")
        limit.write_text(str(limit_bytes))
        yield group
    finally:
        for _ in range(100):  # the kernel takes a moment to forget the last process
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def _own_group() -> Path:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / next(path for _, controllers, path in lines if not controllers).lstrip("/")


class ConfinedPool(RunningPool):
    """A pool whose every process is in the group from its first moment on."""

    def __init__(self, folder: Path, *args: Any, group: Path, **kwargs: Any) -> None:
        super().__init__(folder, *args, **kwargs)
        self._group = group

    def start(self, *, ready: bool = True) -> RunningPool:
        """Start `serve` by a shell that enters the group first."""
        enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self._group)]
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            self.process = subprocess.Popen(
                [*enter, *GPUPOOL, "serve", "-c", str(self.file)], env=self.env, stdout=out, stderr=err
            )
        if ready:
            self.wait(lambda s: s["pool"]["ready"] and not s["pool"]["degraded"])
        return self
