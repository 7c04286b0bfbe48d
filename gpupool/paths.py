"""The runtime directory: where a pool keeps its sockets and its lock, and how its commands find it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: sizeof(sockaddr_un.sun_path) less the closing NUL; a longer path fails in bind() with a bare message.
MAX_SOCKET_PATH: Final = 107
ENV_DIR: Final = "GPUPOOL_RUNTIME_DIR"


@dataclass(frozen=True, slots=True)
class RuntimeDir:
    """Names inside one runtime directory."""

    path: Path

    @property
    def lock(self) -> Path:
        """Held with flock by the supervisor as long as it lives."""
        return self.path / "lock"

    @property
    def control(self) -> Path:
        """The control socket of the command line."""
        return self.path / "control.sock"

    @property
    def workers(self) -> Path:
        """The router's socket for workers."""
        return self.path / "workers.sock"

    @property
    def xid(self) -> Path:
        """Where the kernel-log side-car hands its lines in."""
        return self.path / "xid.sock"

    def snapshot(self, slot: int) -> Path:
        """A worker's last memory snapshot."""
        return self.path / f"snapshot-{slot}.json"

    def profile(self, slot: int) -> Path:
        """A worker's last profile; the worker adds the ending of what it is."""
        return self.path / f"profile-{slot}"

    def stacks(self, process: str) -> Path:
        """Where a process ("supervisor", "router", "worker-0") writes its stacks on a signal, see stack_dump."""
        return self.path / f"stacks-{process}.txt"

    def problem(self) -> str | None:
        """Say what is wrong with this directory's name, if anything is."""
        longest = max(len(os.fsencode(p)) for p in (self.control, self.workers))
        if longest > MAX_SOCKET_PATH:
            return f"runtime directory {self.path}: its socket paths have {longest} bytes, the limit is {MAX_SOCKET_PATH}"
        return None


def default_runtime_dir() -> Path:
    """/run/gpupool for root, else $XDG_RUNTIME_DIR/gpupool, else /tmp/gpupool-UID."""
    if os.geteuid() == 0:
        return Path("/run/gpupool")
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "gpupool"
    return Path(f"/tmp/gpupool-{os.geteuid()}")  # noqa: S108 - the supervisor refuses it unless it is ours and private


def find_runtime_dir(given: str | None) -> RuntimeDir:
    """Resolve the directory a command means: its flag, else GPUPOOL_RUNTIME_DIR, else the default."""
    name = given or os.environ.get(ENV_DIR)
    return RuntimeDir(Path(name).absolute() if name else default_runtime_dir())
