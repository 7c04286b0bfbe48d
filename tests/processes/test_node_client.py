"""The client for Node in docs/examples, which is written from docs/protocol.md alone, against a real pool."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
import zmq

from support.running import HERE, RunningPool

pytestmark = pytest.mark.processes
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "node"
INSTALL = ["npm", "install", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund", "--no-package-lock"]
#: How npm says that there is no registry to reach; any other failure is ours.
UNREACHABLE = re.compile("ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENETUNREACH|ERR_SOCKET_TIMEOUT|ENOTCACHED")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its two packages installed."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node or npm is not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < 18:
        pytest.skip(f"node {version.strip()} is older than 18")
    folder = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(HERE / "node_client_check.mjs", folder)
    try:
        done = subprocess.run(INSTALL, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not install zeromq and @msgpack/msgpack within 60 s")
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("npm cannot reach its registry to install zeromq and @msgpack/msgpack")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_client_for_node_keeps_its_promises(example: Path, make_pool: Callable[..., RunningPool]) -> None:
    pool = make_pool("Trouble", config="[batching]\nmax_batch = 1\nmin_batch = 1\n").start()
    command = ["node", "node_client_check.mjs", f"tcp://127.0.0.1:{pool.port}"]
    with subprocess.Popen(command, cwd=example, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as node:
        assert node.stdout
        try:
            line = node.stdout.readline()
            assert line == "READY\n", line + node.stdout.read()
            pool.wait(lambda _: {3000, 3001} <= {i for note in pool.notes() for i in note["ids"]})
            os.kill(pool.status()["router"]["pid"], signal.SIGKILL)
            rest = node.stdout.read()
            assert (rest, node.wait(30)) == ("DONE\n", 0), rest
        finally:
            node.kill()
    runs = [i for note in pool.notes() for i in note["ids"]]
    assert not {2000, 2001} & set(runs)  # given up while they waited
    assert runs.count(3001) == 1  # must not run twice


def test_the_client_for_node_speaks_curve(example: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    public, router.curve_secretkey = zmq.curve_keypair()
    router.curve_server, router.linger = True, 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    code = f"""
        import {{ Client }} from "./gpupool.js";
        const client = new Client("tcp://127.0.0.1:{port}", {{ curve: {{ serverKey: {public.decode()!r} }} }});
        console.log((await client.infer("secret")).result);
        await client.close();
    """
    command = ["node", "--input-type=module", "-e", code]
    with subprocess.Popen(command, cwd=example, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as node:
        try:
            assert router.poll(20_000)
            peer, header, body = router.recv_multipart()
            reply = {"v": 1, "id": msgpack.unpackb(header)["id"], "code": "ok", "retryable": False}
            router.send_multipart([peer, msgpack.packb(reply), body])
            assert node.communicate(timeout=20)[0] == "secret\n"
        finally:
            node.kill()
            router.close()
            context.term()


def test_the_example_prints_a_result(example: Path, make_pool: Callable[..., RunningPool]) -> None:
    pool = make_pool(workers=1).start()
    endpoint = f"tcp://127.0.0.1:{pool.port}"
    done = subprocess.run(
        ["node", "example.js", endpoint], cwd=example, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "serves toy" in done.stdout
    assert "x: 14" in done.stdout
