"""The control socket: one JSON line in, one JSON line out, for the command line.

A plain AF_UNIX stream, not ZeroMQ, whose second bind on a live path would steal it. The peer's uid comes from the kernel
(SO_PEERCRED); anyone who can reach the socket may look, only root and the pool's own user may steer, and who steered is logged.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson

Answer = dict[str, Any]
#: A verb's implementation: arguments and who asks (uid, pid) in, result out.
Verb = Callable[[dict[str, Any], tuple[int, int]], Awaitable[Any]]

MAX_LINE_BYTES: Final = 64 * 1024
MAX_CONNECTIONS: Final = 16
#: A connection that says nothing for so long is closed.
IDLE_S: Final = 5.0
READ_ONLY: Final = frozenset({"status", "events"})


class Refused(Exception):
    """A verb that cannot be done; becomes the error answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ControlServer:
    """Serves verbs on a socket path that is known to be free (the runtime directory is locked)."""

    def __init__(self, path: Path, verbs: dict[str, Verb]) -> None:
        self._path = path
        self._verbs = verbs
        self._open = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and listen; the socket is for us and our group only, from its first moment on."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o117)
        try:
            sock.bind(str(self._path))
        finally:
            os.umask(old)
        self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=MAX_LINE_BYTES, backlog=MAX_CONNECTIONS)

    def close(self) -> None:
        """Stop listening; the file goes with the runtime directory's clean-up."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MAX_CONNECTIONS:
                await _reply(writer, _error("busy", f"more than {MAX_CONNECTIONS} connections"))
                return
            peer = _peer(writer)
            while line := await asyncio.wait_for(reader.readline(), IDLE_S):
                await _reply(writer, await self._answer(line, peer))
        except ValueError:
            await _reply(writer, _error("bad_request", f"a line is longer than {MAX_LINE_BYTES} bytes"))
        except (TimeoutError, OSError):
            pass  # gone, or silent: nothing is owed
        finally:
            self._open -= 1
            with suppress(OSError):
                writer.close()

    async def _answer(self, line: bytes, peer: tuple[int, int]) -> Answer:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        verb = request.pop("verb", None) if isinstance(request, dict) else None
        if not isinstance(verb, str):
            return _error("bad_request", 'expected one JSON object with a "verb" on a line')
        expires = request.pop("expires", None)
        if isinstance(expires, int | float) and time.monotonic() > expires:
            # Whoever asked was told long ago that we did not answer; doing it now would be behind everybody's back.
            return _error("expired", f"{verb} was asked in vain: the supervisor stood still until the asker had given up")
        if verb not in self._verbs:
            return _error("unknown_verb", f"{verb!r} is none of {', '.join(sorted(self._verbs))}")
        if verb not in READ_ONLY and peer[0] not in (0, os.geteuid()):
            return _error("permission_denied", f"{verb} is for root and uid {os.geteuid()}, you are uid {peer[0]}")
        try:
            return {"ok": True, "result": await self._verbs[verb](request, peer)}
        except Refused as e:
            return _error(e.code, e.message)
        except Exception as e:  # a bug in one verb must not close the door for the next command
            return _error("internal", f"{type(e).__name__}: {e}")


def _error(code: str, message: str) -> Answer:
    return {"ok": False, "error": {"code": code, "message": message}}


async def _reply(writer: asyncio.StreamWriter, answer: Answer) -> None:
    # orjson writes NaN and infinity as null: what goes out is always strict JSON.
    with suppress(OSError):
        writer.write(orjson.dumps(answer, default=str, option=orjson.OPT_NON_STR_KEYS) + b"\n")
        await asyncio.wait_for(writer.drain(), IDLE_S)


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    sock = writer.get_extra_info("socket")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid, pid
