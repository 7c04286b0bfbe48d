"""stacks, profile and top against real pools: while they serve, and when something stands still."""

from __future__ import annotations

import gzip
import json
import os
import pstats
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gpupool.cli import process_stacks
from gpupool.cli.process_stacks import MAX_BYTES, NoStacks, stacks_of
from gpupool.paths import RuntimeDir
from support.running import FAST, GPUPOOL, Load, RunningPool, alive, until

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]
MODEL = "looked_into:LookedInto"
#: The supervisor is to leave alone what the test lets stand still.
PATIENT = FAST.replace("batch_timeout_s = 3.0", "batch_timeout_s = 60.0")


def no_py_spy(_: int, __: float, ___: Any) -> bytes:
    raise NoStacks("py-spy is not installed")


def watch_in_a_terminal(pool: RunningPool) -> None:
    """Run `top` in tmux: it shows the workers, and `d` drains the one that was gone down to."""
    tmux = ["tmux", "-S", str(pool.folder / "tmux"), "-f", "/dev/null"]

    def screen() -> str:
        return subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=False, timeout=20).stdout

    def shown(*words: str) -> None:
        for _ in until(30.0, every=0.1):
            if all(word in screen() for word in words):
                return
        raise AssertionError(f"{words} did not appear: {screen()}")

    command = [*GPUPOOL, "top", "--runtime-dir", str(pool.runtime)]
    environment = {**pool.env, "TERM": "screen", "LC_ALL": "C.UTF-8"}
    subprocess.run([*tmux, "new-session", "-d", "-x", "80", "-y", "24", *command], env=environment, check=True, timeout=20)
    try:
        shown("2/2 workers ready", "0 ready    cpu:0", "1 ready    cpu:1")
        subprocess.run([*tmux, "send-keys", "Down", "d"], check=True, timeout=20)
        shown("1/2 workers ready", "0 ready    cpu:0", "1 drained  cpu:1")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, timeout=20)


def has_py_spy() -> bool:
    return Path(sys.executable).with_name("py-spy").exists() or shutil.which("py-spy") is not None


def test_a_pool_is_looked_into_while_it_serves(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool for all of it: the trace, the table, the stacks of each process by each means, and no request lost."""
    torch_there = True
    try:
        import torch  # noqa: F401
    except ImportError:
        torch_there = False
    pool = make_pool(MODEL, options=f"torch = {str(torch_there).lower()}", config=PATIENT).start()
    before = [pool.pid, *(w["pid"] for w in pool.status()["workers"])]
    load = Load(pool, rate=100, sample={"x": 42.4242})
    load.wait_for(1)

    out = pool.folder / "mine"
    done = pool.cli("profile", "0", "--batches", "5", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["batches"], answer["ended"], answer["file"]) == (5, "batches", str(out))
    if torch_there:
        trace = gzip.decompress(out.read_bytes()).decode()
        assert "aten::matmul" in {event["name"] for event in json.loads(trace)["traceEvents"]}
        assert "42.42" not in trace
        assert "aten::matmul" in {row["name"] for row in answer["operators"]}
    else:
        assert any("marked_echo" in place[2] for place in cast("Any", pstats.Stats(str(out))).stats)

    runtime = RuntimeDir(pool.runtime)
    monkeypatch.setattr(process_stacks, "_by_py_spy", no_py_spy)
    status = pool.status()
    processes = {"supervisor": pool.pid, "router": status["router"]["pid"], "worker-1": status["workers"][1]["pid"]}
    for name, words in {"supervisor": "in run", "router": "router/loop.py", "worker-1": "worker/link.py"}.items():
        for _ in range(2):  # the second takes the place of the first
            seen = stacks_of(processes[name], runtime.stacks(name), timeout_s=30.0)
            assert (seen.means, seen.note, seen.truncated) == ("signal", "py-spy is not installed", False)
            assert words in seen.text
            assert seen.text.count("Current thread") <= 1
        assert runtime.stacks(name).stat().st_mode & 0o077 == 0
    if has_py_spy():
        done = pool.cli("stacks", "cpu:0", "--json")
        answer = json.loads(done.stdout)
        assert answer["process"] == "worker 0"
        assert ("py-spy" in answer["means"] and "MainThread" in answer["text"]) or answer["note"].startswith("py-spy")

    if shutil.which("tmux") is not None:
        watch_in_a_terminal(pool)
    assert set(load.stop()) == {"ok"}
    assert [pool.pid, *(w["pid"] for w in pool.status()["workers"])] == before
    if shutil.which("tmux") is None:
        pytest.skip("all but the screen was looked at: there is no tmux here")


def test_what_stands_still_is_told_apart(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung forward shows where it hangs; a model's own signal is left to it; a stopped process is called stopped; a profile ends in time."""
    pool = make_pool(
        MODEL, options="grab = true", config=PATIENT.replace("heartbeat_timeout_s = 1.0", "heartbeat_timeout_s = 60.0")
    )
    pool.start()
    runtime = RuntimeDir(pool.runtime)
    done = pool.cli("profile", "0", "--seconds", "0.1", "--json")
    assert json.loads(done.stdout)["error"]["code"] == "no_batches"
    assert pool.ask("profile", worker="0", batches=1001)["error"]["code"] == "bad_request"

    with pool.client() as client:
        client.send({"do": "hang"})
        status = pool.wait(lambda s: any(w["running"] for w in s["workers"]))
        (hung,) = [w for w in status["workers"] if w["running"]]
        (other,) = [w for w in status["workers"] if not w["running"]]
        monkeypatch.setattr(process_stacks, "_by_py_spy", no_py_spy)
        file = runtime.stacks(f"worker-{hung['worker']}")
        for _ in until(20.0):  # until a beat has found that the model uses our first signal
            if json.loads(file.read_text().splitlines()[0])["signal"] == signal.SIGUSR1:
                break
        assert "in hang_here" in stacks_of(hung["pid"], file, timeout_s=30.0).text

        os.kill(other["pid"], signal.SIGSTOP)
        try:
            with pytest.raises(NoStacks, match="is stopped"):  # found at once, or while it waits for an answer
                stacks_of(other["pid"], runtime.stacks(f"worker-{other['worker']}"), timeout_s=30.0)
            monkeypatch.undo()
            if has_py_spy():
                seen = json.loads(pool.cli("stacks", str(other["worker"]), "--json").stdout)
                assert "SIGSTOP" in seen.get("note", "") or "py-spy" in seen["error"]["message"]
        finally:
            os.kill(other["pid"], signal.SIGCONT)
        assert alive(hung["pid"])
        assert alive(other["pid"])
        pool.cli("restart-worker", str(hung["worker"]), "--force", "--no-wait")


@pytest.mark.parametrize("command", ["profile", "snapshot"])
def test_a_worker_without_a_beat_is_not_asked_for_what_it_cannot_give(make_pool: MakePool, command: str) -> None:
    pool = make_pool(MODEL, workers=1, config=PATIENT).start()
    os.kill(pool.worker(0)["pid"], signal.SIGSTOP)
    pool.wait(lambda s: s["workers"][0]["late"])
    done = pool.cli(command, "0")
    assert (done.returncode, "`gpupool stacks 0`" in done.stderr) == (1, True), done.stderr


def test_a_process_that_does_not_listen_is_sent_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a process without a handler the signal would be the end."""
    monkeypatch.setattr(process_stacks, "_by_py_spy", no_py_spy)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            file = tmp_path / "stacks"
            with pytest.raises(NoStacks, match="py-spy is not installed; and"):
                stacks_of(process.pid, file, timeout_s=1.0)
            file.write_text(json.dumps({"pid": process.pid + 1, "signal": signal.SIGUSR2}) + "\n")
            with pytest.raises(NoStacks, match="does not listen to a signal"):
                stacks_of(process.pid, file, timeout_s=1.0)
            file.write_text(json.dumps({"pid": process.pid, "signal": signal.SIGUSR2}) + "\n")
            with pytest.raises(NoStacks, match="any more"):
                stacks_of(process.pid, file, timeout_s=1.0)
            assert process.poll() is None
        finally:
            process.kill()


def test_what_is_seen_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stacks, "_by_py_spy", lambda *_: b"x" * (MAX_BYTES + 1))
    seen = stacks_of(os.getpid(), tmp_path / "none", timeout_s=1.0)

    assert seen.truncated
    assert len(seen.text) == MAX_BYTES
