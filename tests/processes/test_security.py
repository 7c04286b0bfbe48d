"""A whole pool with CURVE: set up and used by the commands of docs/security.md."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool.client import Client, DeadlineExceeded
from gpupool.exits import Exit
from gpupool.keys import ENV_KEY_FILE, read_secret
from support.log_lines import check
from support.running import GPUPOOL, RunningPool

pytestmark = pytest.mark.processes

CONFIG = """
[router]
[router.curve]
secret_key_file = "{keys}/pool.key_secret"
authorized_keys_dir = "{keys}/clients"
[router.curve.clients.alice]
max_pending = {bound}
"""


def config(pool: RunningPool, bound: int) -> str:
    text = CONFIG.format(keys=pool.folder / "keys", bound=bound)
    return text.replace("[router]", f'[router]\nbind = ["tcp://127.0.0.1:{pool.port}"]', 1)


def command(pool: RunningPool, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command that asks no pool."""
    return subprocess.run([*GPUPOOL, *args], env=pool.env, capture_output=True, text=True, timeout=40, check=False)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RunningPool]:
    with RunningPool(tmp_path, workers=1) as pool:
        for name, folder in (("pool", "keys"), ("alice", "keys"), ("bob", "keys")):
            assert command(pool, "keygen", name, "--dir", str(tmp_path / folder)).returncode == Exit.OK
        (tmp_path / "keys" / "clients").mkdir()
        (tmp_path / "keys" / "clients" / "alice.key").write_bytes((tmp_path / "keys" / "alice.key").read_bytes())
        pool.write(config(pool, 5))
        yield pool


def test_pool_that_is_set_up_by_its_commands_serves_whom_it_knows(pool: RunningPool) -> None:
    keys = pool.folder / "keys"
    assert command(pool, "check-config", str(pool.file)).returncode == Exit.OK
    pool.start()
    curve = pool.status()["router"]["curve"]
    assert curve["client_keys"] == 1
    assert curve["public_key"] in (keys / "pool.key").read_text()

    done = pool.cli("call", '{"x": 1}', "--key", str(keys / "alice.key_secret"))
    assert (done.returncode, json.loads(done.stdout)["result"]) == (Exit.OK, {"x": 1})
    pool.env[ENV_KEY_FILE] = str(keys / "alice.key_secret")
    server = str(keys / "pool.key")
    endpoint = f"tcp://127.0.0.1:{pool.port}"
    done = command(pool, "call", '{"x": 2}', "--endpoint", endpoint, "--server-key", server)
    assert (done.returncode, json.loads(done.stdout)["result"]) == (Exit.OK, {"x": 2})
    with Client(endpoint, server_key=keys / "pool.key", secret_key=keys / "alice.key_secret") as client:
        assert client.infer({"x": 3}).result == {"x": 3}

    del pool.env[ENV_KEY_FILE]
    done = pool.cli("call", '{"x": 1}')
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (Exit.USAGE, "no_key")
    done = pool.cli("call", '{"x": 1}', "--key", str(keys / "bob.key_secret"))
    assert done.returncode == Exit.UNREACHABLE
    assert "does not know our key" in done.stderr
    assert pool.status()["router"]["handshakes_refused_total"] >= 1

    with urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/metrics", timeout=10) as page:
        metrics = page.read().decode()
    assert "\ngpupool_connections " in metrics
    assert "\ngpupool_handshakes_refused_total " in metrics

    pool.write(config(pool, 6))
    answer = pool.ask("reload")
    assert answer["result"]["applied"] == ["router.curve.clients.alice.max_pending"]

    secrets = [read_secret(keys / f"{name}.key_secret") for name in ("pool", "alice", "bob")]
    for line in (pool.folder / "err").read_text().splitlines():
        check(line)
    told = pool.text() + json.dumps(pool.status()) + done.stdout + done.stderr
    assert not any(secret in told for secret in secrets)


def test_a_client_that_is_not_known_yet_is_told_and_comes_in_once_its_key_is_there(pool: RunningPool) -> None:
    keys = pool.folder / "keys"
    pool.start()
    client = Client(
        f"tcp://127.0.0.1:{pool.port}", server_key=str(keys / "pool.key"), secret_key=str(keys / "bob.key_secret"), timeout=2.0
    )
    with client:
        with pytest.raises(DeadlineExceeded, match="refused the handshake"):
            client.infer(1)
        refused = pool.status()["router"]["handshakes_refused_total"]
        assert 1 <= refused < 10
        (keys / "clients" / "bob.key").write_bytes((keys / "bob.key").read_bytes())

        assert client.infer({"x": 2}, timeout=20.0).result == {"x": 2}


def test_serve_and_check_config_refuse_a_loose_key_alike(pool: RunningPool) -> None:
    (pool.folder / "keys" / "pool.key_secret").chmod(0o644)

    checked = command(pool, "check-config", str(pool.file), "--json")
    (error,) = json.loads(checked.stdout)["error"]["errors"]
    assert (checked.returncode, error["path"]) == (Exit.BAD_CONFIG, "router.curve.secret_key_file")
    pool.start(ready=False)
    assert pool.process
    assert pool.process.wait(20) == Exit.BAD_CONFIG
    (record,) = pool.records("config_error")
    assert (record["path"], record["found"]) == (error["path"], error["found"])
    assert "chmod 600" in record["found"]


def test_requests_of_a_client_that_left_are_not_run(tmp_path: Path) -> None:
    with RunningPool(
        tmp_path, "Sleep", workers=1, options="seconds = 0.2", config="[batching]\nmax_batch = 1\nmax_queue = 2\n"
    ) as pool:
        pool.start()
        with pool.client() as steady, pool.client() as leaver:
            for _ in range(100):
                leaver.send({"i": -1})
            pool.wait(lambda s: s["router"]["pending"] > 90)
            leaver.close()
            pool.wait(lambda s: s["router"]["pending"] == 0)
            for i in range(3):
                assert steady.call({"i": i})[0]["code"] == "ok"
            status = pool.wait(lambda s: s["router"]["in_flight"] == 0)
        ran = [i for note in pool.notes() for i in note["ids"]]
        assert [i for i in ran if i >= 0] == [0, 1, 2]
        assert len(ran) < 3 + 10  # a few had begun before it left
        assert status["router"]["replied_total"]["cancelled"] > 90
        assert status["router"]["undeliverable_total"] > 90
        assert "Traceback" not in pool.text()
