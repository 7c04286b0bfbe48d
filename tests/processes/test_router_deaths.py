"""The router dies, once or again and again: its listeners stay, so callers see latency and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from gpupool.client import AsyncClient, Client
from support.running import FAST, RawClient, RunningPool, until

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]

#: Kills come in quick succession, and the load is heavy: a test fails by an error or a wrong result, never by its speed.
PATIENCE_S = 120.0


def kill_router(pool: RunningPool) -> None:
    """Kill it once it serves, and return when the next one does, with all workers."""
    before = pool.status()["router"]
    os.kill(before["pid"], signal.SIGKILL)
    workers = len(pool.status()["workers"])
    pool.wait(lambda s: s["router"]["restarts"] > before["restarts"] and s["pool"]["workers_ready"] == workers)


@contextlib.contextmanager
def no_router(pool: RunningPool) -> Iterator[None]:
    """Keep the pool without a router: the supervisor, stopped, cannot start one."""
    pid = pool.status()["router"]["pid"]
    os.kill(pool.pid, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        for _ in until(10.0):
            if "Z" in (Path(f"/proc/{pid}/stat")).read_text().rpartition(")")[2].split()[0]:
                break
        yield
    finally:
        os.kill(pool.pid, signal.SIGCONT)


class Callers:
    """Clients of every kind that ask without a pause, each for results that are nobody else's. `stop` raises what any of them met."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.answered = 0
        self.resent = 0  # by the raw client: what a router took to its grave
        self.errors: list[BaseException] = []
        self._ending = threading.Event()
        self._lock = threading.Lock()
        roles = (self._blocking, self._blocking, self._mapping, self._asynchronous, self._raw)
        self._threads = [threading.Thread(target=self._run, args=(n, role)) for n, role in enumerate(roles)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests have been answered."""
        goal = self.answered + more
        for _ in until(PATIENCE_S):
            if self.answered >= goal or self.errors:
                return
        raise AssertionError(f"{self.answered} of {goal} answers")

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, number: int, role: Callable[[int], None]) -> None:
        try:
            role(number)
        except BaseException as e:
            self.errors.append(e)

    def _samples(self, name: str) -> Iterator[dict[str, str]]:
        number = 0
        while not self._ending.is_set():
            number += 1
            yield {"i": f"{name}-{number}"}

    def _check(self, asked: object, got: object) -> None:
        assert got == asked
        with self._lock:
            self.answered += 1

    def _blocking(self, number: int) -> None:
        with Client(self.endpoint, timeout=PATIENCE_S) as client:
            for sample in self._samples(f"blocking-{number}"):
                self._check(sample, client.infer(sample).result)

    def _mapping(self, number: int) -> None:
        asked: deque[dict[str, str]] = deque()

        def remembered() -> Iterator[dict[str, str]]:
            for sample in self._samples(f"mapping-{number}"):
                asked.append(sample)
                yield sample

        with Client(self.endpoint, timeout=PATIENCE_S) as client:
            for reply in client.map(remembered(), concurrency=100):
                self._check(asked.popleft(), reply.result)

    def _asynchronous(self, number: int) -> None:
        async def ask_all() -> None:
            async with AsyncClient(self.endpoint, timeout=PATIENCE_S) as client:

                async def ask_on(samples: Iterator[dict[str, str]]) -> None:
                    for sample in samples:
                        self._check(sample, (await client.infer(sample)).result)

                await asyncio.gather(*(ask_on(self._samples(f"async-{number}-{n}")) for n in range(200)))

        asyncio.run(ask_all())

    def _raw(self, number: int) -> None:
        """A DEALER that knows nothing of lost connections: what stays without an answer is asked again under another id."""
        with contextlib.closing(RawClient(self.endpoint)) as client:
            for sample in self._samples(f"raw-{number}"):
                asked = {client.send(sample)}
                end = time.monotonic() + PATIENCE_S
                while True:
                    reply = client.receive(1.0)
                    if reply is None:
                        assert time.monotonic() < end, f"no reply to {sample}"
                        self.resent += 1
                        asked.add(client.send(sample))
                    elif reply[0]["id"] in asked:
                        assert reply[0]["code"] == "ok", reply[0]
                        self._check(sample, reply[1])
                        break


def test_callers_see_latency_only_while_routers_are_killed(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", options="seconds = 0.002", config=FAST).start()
    callers = Callers(f"tcp://127.0.0.1:{pool.port}")
    for _ in range(5):
        callers.wait_for(300)
        kill_router(pool)
    callers.wait_for(300)
    callers.stop()
    status = pool.wait(lambda s: s["router"]["pending"] == s["router"]["in_flight"] == 0)
    assert status["router"]["restarts"] == 5
    assert all(w["restarts"] == 0 for w in status["workers"])
    assert set(status["router"]["replied_total"]) == {"ok"}
    assert len(pool.records("router_exited", least=5)) == 5


def test_results_for_a_router_that_died_are_dropped_and_counted(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", config=FAST.replace("batch_timeout_s = 3.0", "batch_timeout_s = 60.0")).start()
    with ThreadPoolExecutor(2) as threads, Client(f"tcp://127.0.0.1:{pool.port}", timeout=PATIENCE_S) as client:
        asked = [threads.submit(client.infer, {"i": n, "sleep": 3}) for n in range(2)]
        pool.wait(lambda s: sum(w["running"] for w in s["workers"]) == 2)
        kill_router(pool)
        assert [each.result().result["i"] for each in asked] == [0, 1]
        router = pool.wait(lambda s: s["router"].get("late_results_total") == 2)["router"]
    assert router["replied_total"] == {"ok": 2}
    assert router["accepted_total"] == 2
    assert sorted(i for note in pool.notes() for i in note["ids"]) == [0, 0, 1, 1]  # at least once, and told so


def test_who_comes_while_no_router_is_there_waits_for_the_next(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST).start()
    endpoint = f"tcp://127.0.0.1:{pool.port}"
    with ThreadPoolExecutor(1) as threads, Client(endpoint, timeout=PATIENCE_S) as client, contextlib.ExitStack() as stack:
        with no_router(pool):
            # Connected only now: what a bare socket sends just after its connection broke is lost, which is its user's to repeat.
            req = stack.enter_context(pool.client(zmq.REQ))
            socket.create_connection(("127.0.0.1", pool.port), timeout=5).close()  # one that gives up is no harm
            asked = threads.submit(client.infer, {"i": "library"})
            req.send({"i": "raw"})
            assert req.receive(0.5) is None
            assert not asked.done()
        assert asked.result(PATIENCE_S).result == {"i": "library"}
        reply = req.receive(PATIENCE_S)
    assert reply is not None
    assert (reply[0]["code"], reply[1]) == ("ok", {"i": "raw"})


def test_clients_wait_out_a_router_that_dies_at_every_start(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST).start()
    with ThreadPoolExecutor(4) as threads, Client(f"tcp://127.0.0.1:{pool.port}", timeout=PATIENCE_S) as client:
        dead: set[int] = set()
        asked = []
        for _ in range(4):
            pid = pool.wait(lambda s: s["router"]["pid"] not in dead | {None})["router"]["pid"]
            dead.add(pid)
            os.kill(pid, signal.SIGKILL)
            asked.append(threads.submit(client.infer, {"i": pid}))
        assert {each.result(PATIENCE_S).result["i"] for each in asked} == dead
    assert pool.process
    assert pool.process.poll() is None


def test_listeners_are_the_same_over_restarts_and_no_workers_business(make_pool: MakePool) -> None:
    pool = make_pool(config=FAST)
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:  # a socket's path must be short
        path = Path(folder) / "clients.sock"
        bind = f'"tcp://127.0.0.1:{pool.port}"'
        pool.file.write_text(pool.file.read_text().replace(bind, f'"tcp://127.0.0.1:0", "ipc://{path}"'))
        pool.start()
        kill_router(pool)
        before, count, file = pool.status()["router"]["bind"], len(os.listdir(f"/proc/{pool.pid}/fd")), path.stat().st_ino
        for _ in range(3):
            kill_router(pool)
        status = pool.status()

        assert status["router"]["bind"] == before
        assert before[1:] == [f"ipc://{path}"]
        assert path.stat().st_ino == file
        assert abs(len(os.listdir(f"/proc/{pool.pid}/fd")) - count) <= 2
        listening = listeners_of(pool.pid)
        assert {before[0], f"ipc://{path}", f"ipc://{pool.runtime}/workers.sock"} <= listening.keys()
        ours = {listening[name] for name in (before[0], f"ipc://{path}", f"ipc://{pool.runtime}/workers.sock")}
        assert ours <= sockets_of(status["router"]["pid"])
        for worker in status["workers"]:
            assert not ours & sockets_of(worker["pid"])
        for endpoint in before:
            with Client(endpoint, timeout=PATIENCE_S) as client:
                assert client.infer({"i": endpoint}).result == {"i": endpoint}

        assert pool.process
        pool.process.terminate()
        assert pool.process.wait(20) == 0
        assert not path.exists()


def test_a_stopping_pool_refuses_who_comes_when_its_router_has_gone(make_pool: MakePool) -> None:
    """A worker that does not end holds the stop up; nobody shall wait for a router meanwhile."""
    pool = make_pool("Sleep", config=FAST.replace("stop_timeout_s = 2.0", "stop_timeout_s = 20.0")).start()
    with pool.client() as client:
        client.send({"sleep": 2.5})
        pool.wait(lambda s: any(w["running"] for w in s["workers"]))
        assert pool.process
        pool.process.terminate()
        pool.wait(lambda s: s["pool"]["state"] == "draining")
        assert client.call({})[0]["code"] == "draining"
        os.kill(pool.status()["router"]["pid"], signal.SIGKILL)
        for _ in until(10.0):
            try:
                socket.create_connection(("127.0.0.1", pool.port), timeout=5).close()
            except ConnectionRefusedError:
                break
        else:
            raise AssertionError("still listening")
        assert pool.process.wait(30) == 0
    closed = pool.records("listeners_closed")[0]["time"]
    assert closed < pool.records("pool_quitting")[0]["time"]


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}


def listeners_of(pid: int) -> dict[str, str]:
    """Inodes of the sockets on which a process listens, by endpoint: IPv4 and paths."""
    mine, found = sockets_of(pid), {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and rest[5] in mine:
            host, port = local.split(":")
            found[f"tcp://{socket.inet_ntoa(bytes.fromhex(host)[::-1])}:{int(port, 16)}"] = rest[5]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and int(fields[3], 16) & 0x10000 and fields[6] in mine:  # __SO_ACCEPTCON
            found[f"ipc://{fields[7]}"] = fields[6]
    return found
