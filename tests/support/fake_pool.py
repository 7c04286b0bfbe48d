"""A pool as the command line sees it: a control socket that answers what a test says, well or badly."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Answer = dict[str, Any] | bytes | None


def worker(number: int = 0, state: str = "ready", incarnation: int = 1, **more: Any) -> dict[str, Any]:
    """One worker's entry of a status document."""
    return {
        "worker": number,
        "state": state,
        "pid": 4000 + number,
        "incarnation": incarnation,
        "restarts": 0,
        "last_exit": None,
        "device": {"kind": "cpu", "id": f"cpu:{number}", "name": "some CPU", "health": "ok"},
        "heartbeat_age_ms": 12.5,
        "queue_length": 0,
        "running": 0,
        "in_flight": 0,
        "batch_cap": 32,
        "batch_limit": 32,
        "window_ms": 5.0,
        "memory": {},
        "models": [],
        **more,
    }


def document(*workers: dict[str, Any], ready: bool = True, degraded: bool = False, **router: Any) -> dict[str, Any]:
    """A status document."""
    return {
        "schema": 1,
        "pool": {
            "name": "p",
            "state": "ready",
            "ready": ready,
            "degraded": degraded,
            "version": "1",
            "pid": 1,
            "uptime_s": 3700.5,
        },
        "router": {"state": "ready", "bind": ["tcp://127.0.0.1:1"], "pending": 0, "replied_total": {"ok": 7}, **router},
        "workers": list(workers) or [worker(0), worker(1)],
        "models": [],
    }


def ok(result: Any) -> dict[str, Any]:
    """A good answer."""
    return {"ok": True, "result": result}


def refusal(code: str, message: str, **more: Any) -> dict[str, Any]:
    """A pool's refusal."""
    return {"ok": False, "error": {"code": code, "message": message, **more}}


class FakePool:
    """Listens in a runtime directory of its own until it is closed.

    `reply` makes the answer to each request: a value to send as JSON, bytes to send as they are, or None for silence.
    """

    def __init__(self, reply: Callable[[dict[str, Any]], Answer]) -> None:
        self._reply = reply
        self._folder = tempfile.TemporaryDirectory(prefix="gpupool-")  # a socket's path must be short
        self.folder = Path(self._folder.name)
        self.asked: list[dict[str, Any]] = []
        self.expiries: list[float] = []  # the instants after which each is not to be carried out any more
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.folder / "control.sock"))
        self._server.listen(8)
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            peer.settimeout(5)
            with suppress(OSError):
                request = json.loads(peer.makefile("rb").readline())
                self.expiries.append(request.pop("expires"))
                self.asked.append(request)
                answer = self._reply(request)
                if answer is None:
                    self._open.append(peer)
                    continue
                peer.sendall(answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n")
            peer.close()

    def close(self) -> None:
        """Stop listening and hang up."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)
        for peer in self._open:
            peer.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def steady(result: Any) -> Callable[[dict[str, Any]], Answer]:
    """Answer every verb with the same result."""
    return lambda _: ok(result)
