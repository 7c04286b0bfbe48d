"""The code in docs/client.md and docs/protocol.md runs against a real pool and prints what its comments say; the bytes are the bytes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from support.running import RunningPool

pytestmark = pytest.mark.processes
DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def promised(code: str) -> list[str]:
    """What a program's comments say that it prints: after a `print`, and in lines of comment that continue one."""
    lines = []
    for line in code.splitlines():
        if found := re.search(r"^\s*(?:print\(.*\))?\s+# (.*)$", line):
            lines.append(found[1])
    return lines


@pytest.fixture
def pool(make_pool: Callable[..., RunningPool]) -> RunningPool:
    """A pool with the model of the pages."""
    pool = make_pool(workers=1)
    pool.head = pool.head.replace('name = "toy"', 'name = "doubler"').replace("toy_models:Echo", "doubler:Doubler")
    pool.write(f'[router]\nbind = ["tcp://127.0.0.1:{pool.port}"]\n')
    (pool.folder / "doubler.py").write_text(blocks("client.md", "python")[0])
    return pool.start()


@pytest.mark.parametrize("page", ["client.md", "protocol.md"])
def test_the_code_of_the_page_prints_what_it_says(pool: RunningPool, page: str) -> None:
    code = "\n".join(b for b in blocks(page, "python") if "class Doubler" not in b)
    done = subprocess.run(
        [sys.executable, "-c", code.replace("5555", str(pool.port))],
        env=pool.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised(code)


def test_every_block_of_the_pages_is_of_a_kind_that_is_tried() -> None:
    for page in ("client.md", "protocol.md"):
        fences = re.findall(r"^```(\w*)$", (DOCS / page).read_text(), re.MULTILINE)
        assert set(fences[::2]) <= {"python", "hex"}
        assert set(fences[1::2]) == {""}


def exchange(pool: RunningPool, frames: list[bytes]) -> list[bytes]:
    """Send bytes as they are, and return those of the reply."""
    with pool.client(zmq.DEALER) as client:
        client.socket.send_multipart(frames)
        assert client.socket.poll(10_000)
        reply: list[bytes] = client.socket.recv_multipart()
        return reply


def test_the_bytes_of_the_page_are_those_of_the_wire(pool: RunningPool) -> None:
    request, body, refused, refusal, inline, buffered = (
        [bytes.fromhex(line) for line in block.splitlines()] for block in blocks("protocol.md", "hex")
    )
    assert msgpack.unpackb(request[0]) == {"v": 1, "id": "1", "timeout_ms": 2000}
    assert msgpack.unpackb(request[1]) == {"x": 14}
    header, *rest = exchange(pool, request)
    assert rest == body
    assert msgpack.unpackb(header).items() >= {"v": 1, "id": "1", "code": "ok", "retryable": False, "model": "doubler"}.items()

    assert msgpack.unpackb(refused[0]) == {"v": 1, "id": "2", "model": "none"}
    assert exchange(pool, refused) == [b"".join(refusal), b""]

    ask = msgpack.packb({"v": 1})
    doubled: dict[str, Any] = {"dtype": "float32", "shape": [2], "data": bytes.fromhex("00004040000080c0")}
    for frames in (inline, buffered):
        assert msgpack.unpackb(exchange(pool, [ask, *frames])[1]) == doubled


def test_info_tells_what_the_page_says(pool: RunningPool) -> None:
    info = msgpack.unpackb(exchange(pool, [msgpack.packb({"v": 1, "type": "info"})])[1])
    (sentence,) = re.findall(r"answered `ok` with a map: (.*?)\. `cancel`", (DOCS / "protocol.md").read_text(), re.DOTALL)
    names = set(re.findall(r"`(\w+)`", sentence))
    assert names == {*info, *info["limits"], *info["models"][0]}
