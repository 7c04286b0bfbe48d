"""A pool for the time being: `gpupool serve` in a temporary folder on a free port of the loopback address, gone with its owner."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from gpupool.cli.control import status_of
from gpupool.cli.output import Failure
from gpupool.exits import Exit
from gpupool.paths import RuntimeDir

_READY_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 45.0
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Place:
    """What a temporary pool's configuration must contain."""

    runtime_dir: str
    endpoint: str
    log_file: str


class TemporaryPool:
    """A pool as a context manager; SIGTERM to its owner ends it as Ctrl-C does.

    Args:
        config: makes the configuration's text, given the `Place` that it must use.
        environment: the pool's; default: this process's own.
    """

    def __init__(self, config: Callable[[Place], str], *, environment: Mapping[str, str] | None = None) -> None:
        self._config = config
        self._environment = environment
        self._folder = _folder()
        self._path = Path(self._folder.name)
        self._runtime = RuntimeDir(self._path / "run")
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self.endpoint = ""

    def __enter__(self) -> Self:
        try:
            self.endpoint = f"tcp://127.0.0.1:{_free_port()}"
            config = self._path / "pool.toml"
            config.write_text(self._config(Place(str(self._runtime.path), self.endpoint, str(self._path / "pool.log"))))
            self._old_handlers = {n: signal.signal(n, self._interrupt) for n in (signal.SIGTERM, signal.SIGINT)}
            # A group of its own: Ctrl-C reaches the owner alone, which then stops the pool in order.
            with (self._path / "stderr").open("wb") as stderr:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "gpupool", "serve", "-c", str(config)],
                    env=self._environment,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    process_group=0,
                    preexec_fn=_die_with_parent,  # noqa: PLW1509 - no thread runs yet; a killed owner would leave its pool behind
                )
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._process is not None and self._process.poll() is None:
                self._end(self._process)
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            self._folder.cleanup()

    def wait_ready(self, tell: Callable[[str], object]) -> dict[str, Any]:
        """Wait until every worker is ready, telling how far they are; returns the status document.

        Raises:
            Failure: when the pool ends, or is not ready in time; with its last words.
        """
        until = time.monotonic() + _READY_TIMEOUT_S
        last = "no answer"
        while time.monotonic() < until:
            if self._interrupted:
                raise KeyboardInterrupt
            if self._process is None or self._process.poll() is not None:
                raise Failure("pool_failed", f"the pool did not start\n{self._last_words()}")
            with contextlib.suppress(Failure):  # it is not listening yet
                document = status_of(self._runtime)
                last = ", ".join(f"worker {w['worker']} {w['state']}" for w in document["workers"])
                tell(last)
                if document["pool"]["ready"] and all(w["state"] == "ready" for w in document["workers"]):
                    return document
                if any(w["state"] in {"parked", "quarantined", "lost", "unkillable"} for w in document["workers"]):
                    raise Failure("pool_failed", f"{last}\n{self._last_words()}") from None
            time.sleep(0.1)
        raise Failure("timeout", f"not ready after {_READY_TIMEOUT_S:g} s: {last}\n{self._last_words()}", Exit.TIMEOUT)

    def _interrupt(self, *_: object) -> None:
        # Kept too: an exception that comes up in a finalizer, say, Python drops.
        self._interrupted = True
        raise KeyboardInterrupt

    def stop(self) -> None:
        """Stop the pool as systemd would.

        Raises:
            Failure: when it did not end, or not with exit code 0.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        assert self._process is not None
        code = self._end(self._process)
        if code != 0:
            raise Failure("pool_failed", f"the pool ended with exit code {code}\n{self._last_words()}")

    def log_lines(self) -> Iterator[dict[str, Any]]:
        """What the pool has logged."""
        with contextlib.suppress(FileNotFoundError), (self._path / "pool.log").open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def status(self) -> dict[str, Any]:
        """The status document; raises Failure."""
        return status_of(self._runtime)

    def _end(self, process: subprocess.Popen[bytes]) -> int | None:
        process.terminate()
        try:
            return process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            return process.returncode
        except KeyboardInterrupt:  # a second Ctrl-C: the pool's workers die with it
            process.kill()
            raise

    def _last_words(self) -> str:
        errors = [line for line in self.log_lines() if line.get("level") in {"error", "critical"}]
        told = [json.dumps({k: v for k, v in line.items() if k not in {"time", "timestamp"}}) for line in errors[-5:]]
        with contextlib.suppress(OSError):
            told += (self._path / "stderr").read_text(errors="replace").splitlines()[-10:]
        return "\n".join(told)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder where temporary ones belong, or in /tmp where its sockets' paths would be too long for the kernel."""
    folder = tempfile.TemporaryDirectory(prefix="gpupool-demo-")
    if RuntimeDir(Path(folder.name) / "run").problem():
        folder.cleanup()
        folder = tempfile.TemporaryDirectory(prefix="gpupool-demo-", dir="/tmp")
    return folder


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


_libc: Final = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
