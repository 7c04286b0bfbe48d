"""A host with pretended cards: the fake NVML library, built once, and the file that tells it what to say."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpupool.board import Board
from gpupool.supervisor.process import Child

SOURCE = Path(__file__).parent / "fake_nvml" / "fake_nvml.c"
#: As a shuffled host has them: the order of enumeration is not the order on the bus.
UUIDS = [f"GPU-{n}0000000-aaaa-bbbb-cccc-00000000000{n}" for n in range(4)]
BUSES = ["0000:9b:00.0", "0000:18:00.0", "0000:ca:00.0", "0000:3b:00.0"]
#: How long a test waits for what must come; the machine may be busy.
PATIENCE_S = 30.0


@cache
def library() -> Path:
    """Build the library once a session and return its folder; skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the fake NVML needs a C compiler (gcc or cc), and there is none")
    folder = Path(tempfile.gettempdir()) / f"gpupool-fake-nvml-{os.getuid()}-{int(SOURCE.stat().st_mtime_ns)}"
    made = folder / "libnvidia-ml.so.1"
    if not made.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        new = folder / f"{os.getpid()}.so"
        flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden"]
        subprocess.run([compiler, *flags, "-Wl,-soname,libnvidia-ml.so.1", "-o", new, SOURCE], check=True)
        new.replace(made)  # whole, also for another test session that comes to it now
    return folder


class FakeCards:
    """One pretended host. The file may be appended to at any time: the last line wins."""

    def __init__(self, folder: Path, uuids: list[str] = UUIDS) -> None:
        self.state = folder / "nvml-state"
        self.state.touch()
        self.library = library()
        for uuid, bus in zip(uuids, BUSES, strict=False):
            self.say(f'gpu {uuid} name="Fake H200" bus={bus} mem_used=1024 util=50 temp=41 power=300000')

    def say(self, line: str | bytes) -> None:
        """Append one directive; see the head of fake_nvml.c."""
        with self.state.open("ab") as f:
            f.write((line if isinstance(line, bytes) else line.encode()) + b"\n")

    def environment(self) -> dict[str, str]:
        """What makes a process see these cards."""
        return {"LD_LIBRARY_PATH": str(self.library), "FAKE_NVML_STATE": str(self.state)}


class ProbeProcess:
    """A real probe, started and heard as the supervisor does it."""

    def __init__(self, environment: dict[str, str], devices: list[str], **spec: Any) -> None:
        self._selector = selectors.DefaultSelector()
        self.messages: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.ended = False
        self._board = Board.create(1)
        self._life = os.memfd_create("life")
        self.child = Child(
            "gpupool.supervisor.cards.probe", loop=self, environment=environment, board_fd=self._board.fd, life_fd=self._life, log_fd=2,
            on_exit=self._on_exit, on_readable=self._on_readable, on_line=lambda _, __, line: self.lines.append(line),
        )  # fmt: skip
        log = {"level": "info", "format": "json", "file": "", "fd": 2, "queue_size": 100}
        spec = {"interval_s": 0.1, "kernel_log": False, **spec}
        self.child.channel.send({"t": "spec", "devices": devices, "log": log, **spec})

    def add_reader(self, fd: int, callback: Callable[..., object], *args: object) -> object:
        """Part of the loop that Child needs."""
        return self._selector.register(fd, selectors.EVENT_READ, (callback, args))

    def remove_reader(self, fd: int) -> object:
        """Part of the loop that Child needs."""
        try:
            return self._selector.unregister(fd)
        except (KeyError, ValueError):
            return None

    def until(self, what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
        """Run the loop until something is so, and return it."""
        deadline = time.monotonic() + patience_s
        while not (found := what()):
            assert time.monotonic() < deadline, f"never came; said {self.messages[-3:]}, wrote {self.lines[-5:]}"
            for key, _ in self._selector.select(0.1):
                callback, args = key.data
                callback(*args)
        return found

    def wait_for(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for a message of this kind with these values, counting those that were said already."""
        message: dict[str, Any] = self.until(
            lambda: next((m for m in self.messages if m["t"] == kind and all(m.get(k) == v for k, v in fields.items())), None)
        )
        return message

    def card(self, uuid: str, what: Callable[[dict[str, Any]], Any] = lambda _: True) -> dict[str, Any]:
        """Wait for a reading of a card, from now on, of which something is so."""
        seen = len(self.messages)
        found: dict[str, Any] = self.until(
            lambda: next(
                (c for m in self.messages[seen:] if m["t"] == "readings" for c in m["cards"] if c["uuid"] == uuid and what(c)),
                None,
            )
        )
        return found

    def close(self) -> None:
        """End it, whatever it is doing."""
        import signal

        if not self.ended:
            self.child.signal(signal.SIGKILL)
            self.until(lambda: self.ended)
        self._selector.close()
        os.close(self._life)

    def _on_readable(self, child: Child) -> None:
        try:
            message = child.channel.receive()
        except EOFError:
            child.ignore_channel()
            return
        if message is not None:
            self.messages.append(message)

    def _on_exit(self, _: Child) -> None:
        self.ended = True
