"""What others do to a pool's files, descriptors and processes must not leave it standing there green and deaf."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from support.running import FAST, GPUPOOL, RunningPool

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]


def test_a_frozen_router_is_not_ready_and_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST).start()
    old = pool.status()["router"]["pid"]
    os.kill(old, signal.SIGSTOP)
    status = pool.wait(lambda s: not s["pool"]["ready"])
    assert status["router"]["pid"] in (old, None)
    pool.wait(lambda s: s["router"]["pid"] not in (old, None) and s["pool"]["workers_ready"] == 2)
    with pool.client() as client:
        assert client.call({})[0]["code"] == "ok"
    assert all(w["restarts"] == 0 for w in pool.status()["workers"])


def test_frozen_workers_are_not_counted_as_ready(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST.replace("batch_timeout_s = 3.0", "batch_timeout_s = 60.0")).start()
    pids = [pool.worker(n)["pid"] for n in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    pool.wait(lambda s: s["pool"]["workers_ready"] == 0)
    assert pool.cli("status").returncode == 5
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/readyz", timeout=5)
    refused.value.close()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    pool.wait(lambda s: s["pool"]["workers_ready"] == 2)


def test_removed_sockets_are_noticed_and_made_anew(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST).start()
    pool.runtime.rename(pool.folder / "gone")  # all at once: the pool may be writing an event there
    shutil.rmtree(pool.folder / "gone")
    pool.wait(lambda s: s["router"]["restarts"] == 1 and s["pool"]["workers_ready"] == 2)
    second = subprocess.run(
        [*GPUPOOL, "serve", "-c", str(pool.file)], env=pool.env, capture_output=True, timeout=30, check=False
    )
    assert second.returncode == 75
    assert pool.cli("restart-worker", "0").returncode == 0
    with pool.client() as client:
        assert client.call({})[0]["code"] == "ok"


def test_an_ipc_address_takes_nothing_from_anybody(make_pool: MakePool) -> None:
    pool = make_pool()
    file, live = pool.folder / "precious", pool.folder / "live.sock"
    file.write_text("keep me")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(live))
        other.listen()
        text = pool.file.read_text()
        for path in (file, live):
            pool.file.write_text(text.replace(f"tcp://127.0.0.1:{pool.port}", f"ipc://{path}"))
            pool.start(ready=False)
            assert pool.process
            assert pool.process.wait(30) == 1
            assert str(path) in pool.records("cannot_start")[-1]["error"]
        assert file.read_text() == "keep me"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(live))


def test_closed_standard_descriptors_are_no_reason_to_fail(make_pool: MakePool) -> None:
    pool = make_pool()
    command = " ".join([*GPUPOOL, "serve", "-c", str(pool.file), ">&-", "2>&-", "<&-"])
    pool.process = subprocess.Popen(["sh", "-c", f"exec {command}"], env=pool.env)
    pool.text = lambda: ""  # type: ignore[method-assign]
    pool.wait(lambda s: s["pool"]["ready"])
    pool.process.terminate()
    assert pool.process.wait(20) == 0


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_log_file_that_cannot_be_opened_is_told_and_ends_the_start(make_pool: MakePool, kind: str) -> None:
    pool = make_pool()
    place = pool.folder / "log"
    if kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    pool.file.write_text(pool.file.read_text() + f'\n[logs]\nfile = "{place}"\n')
    pool.start(ready=False)
    assert pool.process
    assert pool.process.wait(20) == 1
    assert str(place) in pool.text()


def test_an_order_that_nobody_waits_for_any_more_is_not_carried_out(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST).start()
    os.kill(pool.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert pool.cli("restart-worker", "0", "--force").returncode == 3
    assert time.monotonic() - began < 30
    os.kill(pool.pid, signal.SIGCONT)
    assert pool.cli("drain", "1").returncode == 0
    status = pool.status()
    assert (status["workers"][0]["incarnation"], status["workers"][1]["state"]) == (1, "drained")
