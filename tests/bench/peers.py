"""What gpupool is compared with: libzmq's own proxy before two echo processes, one echo process without anything, and a plain loop.

Each role is a process: `python -m tests.bench.peers ROLE ARGUMENTS…`. The echo processes do to a message what any server has to do:
decode the header, encode the reply's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import msgpack
import zmq


@contextlib.contextmanager
def proxied(echoes: int = 2) -> Iterator[str]:
    """libzmq's proxy, ROUTER to DEALER, with so many echo processes behind it; yields the endpoint."""
    with tempfile.TemporaryDirectory() as folder:
        front, back = f"ipc://{folder}/front", f"ipc://{folder}/back"
        with role("proxy", "tcp://127.0.0.1:*", back) as proxy:
            front = _line(proxy)
            with contextlib.ExitStack() as stack:
                for _ in range(echoes):
                    stack.enter_context(role("echo", back))
                yield front


@contextlib.contextmanager
def direct() -> Iterator[str]:
    """One echo process that binds its socket itself; yields the endpoint."""
    with role("server", "tcp://127.0.0.1:*") as server:
        yield _line(server)


def plain_loops(processes: int, threads: int, batch: int, seconds: float, device: str) -> float:
    """Texts a second that the MiniLM model does in bare loops, all processes together."""
    with contextlib.ExitStack() as stack:
        arguments = (str(threads), str(batch), str(seconds), device)
        loops = [stack.enter_context(role("loop", *arguments, threads=threads)) for _ in range(processes)]
        for loop in loops:
            _line(loop)  # loaded and warm
        for loop in loops:
            assert loop.stdin is not None
            loop.stdin.write(b"go\n")
            loop.stdin.flush()
        return sum(float(_line(loop)) for loop in loops)


@contextlib.contextmanager
def role(name: str, *arguments: str, threads: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run one role as long as the context lasts."""
    env = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    command = [sys.executable, "-m", "tests.bench.peers", name, *arguments]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line:
        raise SystemExit(f"{process.args!r} said nothing")
    return line


def _socket(kind: int) -> zmq.Socket[bytes]:
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    sock.sndhwm = sock.rcvhwm = 0
    sock.backlog = 1024  # as the router; at libzmq's 100, clients that come all at once wait for TCP's retries
    return sock


def _proxy(front: str, back: str) -> None:
    clients, workers = _socket(zmq.ROUTER), _socket(zmq.DEALER)
    clients.bind(front)
    workers.bind(back)
    print(clients.get_string(zmq.LAST_ENDPOINT).rstrip("\0"), flush=True)
    zmq.proxy(clients, workers)


def _echo(back: str) -> None:
    sock = _socket(zmq.DEALER)
    sock.connect(back)
    _answer(sock)


def _server(front: str) -> None:
    sock = _socket(zmq.ROUTER)
    sock.bind(front)
    print(sock.get_string(zmq.LAST_ENDPOINT).rstrip("\0"), flush=True)
    _answer(sock)


def _answer(sock: zmq.Socket[bytes]) -> None:
    while True:
        peer, head, body = sock.recv_multipart()
        header = msgpack.unpackb(head)
        sock.send_multipart([peer, msgpack.packb({"v": 1, "id": header["id"], "code": "ok", "retryable": False}), body])


def _loop(threads: str, batch: str, seconds: str, device: str) -> None:
    import torch

    from gpupool.demo import model_directory, read_paragraphs
    from gpupool.worker.models import Context

    sys.path.insert(0, str(model_directory()))
    import model  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(int(threads))
    handler = model.MiniLM()
    options = json.loads((model_directory() / "manifest.json").read_text())["options"]
    handler.load(Context(device, options, str(model_directory()), None, int(threads)))
    texts, size = read_paragraphs(None), int(batch)

    def one(at: int) -> None:
        samples = [{"text": texts[(at + n) % len(texts)]} for n in range(size)]
        outputs = handler.forward([handler.preprocess(sample) for sample in samples]).cpu()
        for output in outputs:
            handler.postprocess(output)

    with torch.inference_mode():
        one(0)
        print("ready", flush=True)
        sys.stdin.readline()
        done, began = 0, time.perf_counter()
        while (now := time.perf_counter()) < began + float(seconds):
            one(done)
            done += size
    print(done / (now - began), flush=True)


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {"proxy": _proxy, "echo": _echo, "server": _server, "loop": _loop}
    roles[sys.argv[1]](*sys.argv[2:])
