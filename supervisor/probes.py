"""/livez, /readyz and /metrics over HTTP, for load balancers, orchestrators and Prometheus.

Liveness says that the supervisor's loop turns; readiness that requests would be served. It stays live while it drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

_MAX_REQUEST_BYTES: Final = 8192
_TIMEOUT_S: Final = 5.0
#: More than this many at once are hung up on: they would take the descriptors that workers need.
_MAX_CONNECTIONS: Final = 64


class ProbeServer:
    """Answers; `ready` returns (ready, reason), `metrics` the text of the page."""

    def __init__(self, bind: str, ready: Callable[[], tuple[bool, str]], metrics: Callable[[], Awaitable[str]]) -> None:
        self._host, _, port = bind.rpartition(":")
        self._port = int(port)
        self._ready = ready
        self._metrics = metrics
        self._open = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; raises OSError when the address is taken."""
        self._server = await asyncio.start_server(self._serve, self._host.strip("[]"), self._port, limit=_MAX_REQUEST_BYTES)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A scraper that hangs up in the middle, or never asks, harms nobody: every wait here is bounded and every error ends here.
        self._open += 1
        if self._open <= _MAX_CONNECTIONS:
            await self._talk(reader, writer)
        self._open -= 1
        with suppress(OSError):
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_S)
            writer.write(await self._answer(head.split(b"\r\n", 1)[0]))
            await asyncio.wait_for(writer.drain(), _TIMEOUT_S)

    async def _answer(self, request_line: bytes) -> bytes:
        method, _, rest = request_line.partition(b" ")
        path = rest.split(b" ")[0].split(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET\n", head=False)
        head = method == b"HEAD"
        if path == b"/livez":
            return _response("200 OK", "live\n", head=head)
        if path == b"/readyz":
            ready, reason = self._ready()
            return _response("200 OK" if ready else "503 Service Unavailable", reason + "\n", head=head)
        if path == b"/metrics":
            return _response("200 OK", await self._metrics(), head=head, kind="text/plain; version=0.0.4; charset=utf-8")
        return _response("404 Not Found", "there are /livez, /readyz and /metrics\n", head=head)


def _response(status: str, body: str, *, head: bool, kind: str = "text/plain; charset=utf-8") -> bytes:
    text = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n"
        f"Connection: close\r\n\r\n{'' if head else body}"
    )
    return text.encode()
