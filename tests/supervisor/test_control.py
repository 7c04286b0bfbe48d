"""The control socket: one line in, one line out, whatever comes."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gpupool.supervisor.control import MAX_CONNECTIONS, MAX_LINE_BYTES, ControlServer, Refused


async def status(_: dict[str, Any], peer: tuple[int, int]) -> Any:
    return {"uid": peer[0], "nan": float("nan")}


async def refuse(_: dict[str, Any], __: tuple[int, int]) -> Any:
    raise Refused("unknown_worker", "no worker '9'")


async def broken(_: dict[str, Any], __: tuple[int, int]) -> Any:
    raise KeyError("bug")


def with_server(path: Path, talk: Callable[[Path], Awaitable[None]]) -> None:
    async def main() -> None:
        server = ControlServer(path, {"status": status, "refuse": refuse, "broken": broken})
        await server.start()
        try:
            await asyncio.wait_for(talk(path), 20)
        finally:
            server.close()

    asyncio.run(main())


async def ask(path: Path, line: bytes) -> Any:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(line)
    answer = await reader.readline()
    writer.close()
    return json.loads(answer)


def test_answers_are_strict_json_and_errors_are_answers(tmp_path: Path) -> None:
    async def talk(path: Path) -> None:
        assert (await ask(path, b'{"verb": "status"}\n'))["result"]["nan"] is None
        assert (await ask(path, b'{"verb": "refuse"}\n'))["error"] == {"code": "unknown_worker", "message": "no worker '9'"}
        assert (await ask(path, b'{"verb": "broken"}\n'))["error"]["code"] == "internal"
        assert (await ask(path, b'{"verb": "nope"}\n'))["error"]["code"] == "unknown_verb"
        for rubbish in (b"\n", b"[]\n", b"7\n", b"\xff\xfe\n", b'{"verb": []}\n', b"{}\n"):
            assert (await ask(path, rubbish))["ok"] is False
        assert (await ask(path, b"x" * (MAX_LINE_BYTES + 10) + b"\n"))["error"]["code"] == "bad_request"
        assert (await ask(path, b'{"verb": "status"}\n'))["ok"]

    path = tmp_path / "control.sock"
    with_server(path, talk)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_too_many_connections_are_told_so_and_leave_room_when_they_go(tmp_path: Path) -> None:
    async def talk(path: Path) -> None:
        idle = [await asyncio.open_unix_connection(str(path)) for _ in range(MAX_CONNECTIONS)]
        for reader, writer in idle:
            writer.write(b'{"verb": "status"}\n')
            await reader.readline()
        assert (await ask(path, b'{"verb": "status"}\n'))["error"]["code"] == "busy"
        for _, writer in idle:
            writer.close()
        while not (await ask(path, b'{"verb": "status"}\n'))["ok"]:  # bounded by the time limit around the talk
            pass

    with_server(tmp_path / "control.sock", talk)
