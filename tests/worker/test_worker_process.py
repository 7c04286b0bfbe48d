"""A real worker process against a router and a supervisor played by the test."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from gpupool import link
from gpupool.board import ENV_FD as BOARD_FD
from gpupool.board import Board, Phase, SlotWord, Word
from gpupool.channel import ENV_FD as CHANNEL_FD
from gpupool.channel import Channel, Message
from gpupool.child import ENV_PARENT
from gpupool.exits import Exit
from gpupool.link import Hello, Result, Work, WorkFlag
from gpupool.samples import unpack_body
from gpupool.spec import BatchingSpec, LogSpec, ModelSpec, WorkerSpec, to_message
from gpupool.worker.link import CUT_S

pytestmark = pytest.mark.processes

DEADLINE_S = 30.0

HANDLERS = '''
import os, signal, subprocess, sys, threading, time

class Echo:
    def forward(self, batch):
        return batch

class Sized:
    """Says in what company each sample was."""
    def forward(self, batch):
        return [len(batch)] * len(batch)

class Does:
    """Does what the sample says."""
    def load(self, context):
        self.context = context

    def forward(self, batch):
        out = list(batch)
        for x in batch:
            do = x.get("do") if isinstance(x, dict) else None
            if do == "raise": raise ValueError("secret-marker is bad")
            if do == "exit": sys.exit(3)
            if do == "sleep": time.sleep(x["s"])
            if do == "wait":
                while not os.path.exists(x["for"]): time.sleep(0.002)
            if do == "short": return out[:-1]
            if do == "none": return None
            if do == "sticky": raise RuntimeError("CUDA error: device-side assert triggered")
            if do == "oom" and len(batch) > x["over"]: raise MemoryError
            if do == "print": print("printed \\udcff " + "x" * 5000)
            if do == "helper": out[0] = subprocess.run([sys.executable, "-c", "import sys; sys.exit(3)"]).returncode
            if do == "fork":
                pid = os.fork()
                if not pid:
                    time.sleep(60)
                    os._exit(0)
                os.kill(pid, signal.SIGTERM)
                out[0] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if do == "context": out[0] = [self.context.device, self.context.options]
        return out

class Weird:
    def forward(self, batch):
        import numpy as np
        import torch
        made = {
            "f32": lambda: np.float32(1.5), "i64": lambda: np.int64(7), "bool": lambda: np.bool_(True), "nan": lambda: float("nan"),
            "bf16": lambda: torch.ones(2, dtype=torch.bfloat16), "set": lambda: {1}, "big": lambda: 2 ** 70,
            "array": lambda: np.arange(6).reshape(2, 3).T, "inference": lambda: torch.is_inference_mode_enabled(),
        }
        return [made[k]() for k in batch]

class Hangs:
    def preprocess(self, sample):
        threading.Event().wait()
    def forward(self, batch): ...

class Waits:
    """Its preprocess waits for the file that the sample names, and notes that it began."""
    def preprocess(self, sample):
        if isinstance(sample, dict):
            open(sample["for"] + ".begun", "w").close()
            while not os.path.exists(sample["for"]): time.sleep(0.002)
        if sample == "sticky": raise RuntimeError("CUDA error: device-side assert triggered")
        return sample
    def forward(self, batch):
        return batch

class BadLoad:
    def load(self, context):
        raise OSError("weights are missing")
    def forward(self, batch): ...

class SlowLoad:
    def load(self, context):
        print("loading", flush=True)
        time.sleep(60)
    def forward(self, batch): ...

class TakesSignals:
    """Libraries do this, and leave threads behind that never end."""
    def load(self, context):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=threading.Event().wait).start()
    def forward(self, batch):
        return batch
'''


class Stage:
    """The worker's world: a board, a channel, a ROUTER socket, and pipes for its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "wp_models.py").write_text(HANDLERS)
        self.board = Board.create(2)
        self.board.set(Word.ROUTER_EPOCH, 1)
        self.endpoint = f"ipc://{folder}/w.sock"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.bind()
        self.channel, self._theirs = Channel.pair()
        self.process: subprocess.Popen[bytes] | None = None
        self.peer = b""
        self.ticket = 0
        self.results: dict[int, Result] = {}
        self.returned: list[int] = []

    def bind(self) -> zmq.Socket[bytes]:
        router = self.context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.LINGER, 0)
        router.bind(self.endpoint)
        return router

    def spec(
        self,
        handler: str,
        options: dict[str, Any] | None = None,
        *,
        batch_timeout_s: float = 60.0,
        preprocess_threads: int = 1,
        **batching: Any,
    ) -> WorkerSpec:
        policy = BatchingSpec(**{"window_ms": 50.0, "adaptive": False, **batching})
        model = ModelSpec(
            "m", handler=f"wp_models:{handler}", options=options or {}, batching=policy, preprocess_threads=preprocess_threads
        )
        return WorkerSpec(
            pool="p", slot=1, incarnation=7, token="token", router_endpoint=self.endpoint, device="cpu", device_id="cpu:1",
            models=(model,), heartbeat_interval_s=0.05, batch_timeout_s=batch_timeout_s, search_path=(str(self.folder),), log=LogSpec(level="info"),
        )  # fmt: skip

    def start(self, handler: str = "Echo", options: dict[str, Any] | None = None, **batching: Any) -> None:
        env = dict(os.environ)
        env |= {CHANNEL_FD: str(self._theirs.fileno()), BOARD_FD: str(self.board.fd), ENV_PARENT: str(os.getpid())}
        with (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpupool.worker"], env=env, pass_fds=[self._theirs.fileno(), self.board.fd],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
            )  # fmt: skip
        self._theirs.close()
        assert self.channel.send(to_message(self.spec(handler, options, **batching)))

    def welcome(self) -> Hello:
        """Take in HELLO and answer it."""
        self.peer, *frames = self.receive()
        hello = link.unpack_hello(frames)
        self.router.send_multipart([self.peer, *link.pack_tickets(link.WELCOME, [hello.epoch])])
        return hello

    def join(self, handler: str = "Echo", options: dict[str, Any] | None = None, **batching: Any) -> Hello:
        self.start(handler, options, **batching)
        return self.welcome()

    def receive(self) -> list[bytes]:
        assert self.router.poll(int(DEADLINE_S * 1000)), f"the worker is silent: {self.errors()}"
        return self.router.recv_multipart()

    def send(self, *values: Any, flags: int = 0, timeout_s: float = 30.0, priority: int = 5) -> list[int]:
        """Send each value as a request, all in one message."""
        works = []
        for value in values:
            self.ticket += 1
            rows = len(value) if flags & WorkFlag.MANY else 1
            works.append(Work(self.ticket, 0, flags, rows, timeout_s, priority, [msgpack.packb(value)]))
        self.router.send_multipart([self.peer, *link.pack_work(works)])
        return [w.ticket for w in works]

    def collect(self, tickets: list[int]) -> list[Result]:
        """Wait until all are answered or given back."""
        while not set(tickets) <= self.results.keys() | set(self.returned):
            _, *frames = self.receive()
            if frames[0] == link.BYE:
                self.returned += link.unpack_tickets(frames)
                continue
            for result in link.unpack_results(frames):
                assert result.ticket not in self.results, "answered twice"
                self.results[result.ticket] = result
        return [self.results[t] for t in tickets if t in self.results]

    def ask(self, *values: Any, **how: Any) -> list[Result]:
        return self.collect(self.send(*values, **how))

    def message(self) -> Message:
        """Return the next channel message; reports, which come by the second, are none."""
        found: list[Message] = []

        def there() -> bool:
            if (message := self.channel.receive()) is not None and message["t"] != "report":
                found.append(message)
            return bool(found)

        self.until(there)
        return found[0]

    def until(self, true: Callable[[], Any]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < end, f"waited in vain: {self.errors()}"
            time.sleep(0.002)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def errors(self) -> str:
        return (self.folder / "err").read_text() if (self.folder / "err").exists() else ""

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors().splitlines()]

    def output(self) -> bytes:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
        self.channel.close()
        self._theirs.close()
        self.router.close(linger=0)
        self.context.term()
        self.board.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    world = Stage(tmp_path)
    yield world
    world.close()


def value(result: Result) -> Any:
    assert result.code == "ok", result
    return unpack_body(result.frames[0], result.frames[1:])


def test_a_worker_says_hello_and_tells_what_it_loaded(stage: Stage) -> None:
    hello = stage.join("Does", {"k": 1}, max_batch=16)

    assert hello == Hello(1, 7, 1, "token", 16)
    loaded = stage.message()
    assert loaded["t"] == "loaded"
    assert loaded["models"] == [{"name": "m", "version": "1"}]
    stage.until(lambda: stage.board.read(1).router_epoch == 1)
    record = stage.board.read(1)
    assert stage.process is not None
    assert (record.incarnation, record.pid, record.phase) == (7, stage.process.pid, Phase.IDLE)
    assert record.batch_limit == 16
    assert record.memory_bytes > 1 << 20
    assert value(stage.ask({"do": "context"})[0]) == ["cpu", {"k": 1}]


def test_the_beat_goes_on_while_a_batch_runs(stage: Stage) -> None:
    stage.join("Does")
    tickets = stage.send({"do": "wait", "for": str(stage.folder / "go")})
    stage.until(lambda: stage.board.read(1).phase is Phase.BATCH)
    first = stage.board.read(1)

    stage.until(lambda: stage.board.read(1).beat_ns > first.beat_ns)
    assert stage.board.running(1) == tickets
    assert first.phase_deadline_ns > first.phase_since_ns
    assert (first.running, first.queued) == (1, 0)

    (stage.folder / "go").touch()
    stage.collect(tickets)
    stage.until(lambda: stage.board.read(1).phase is Phase.IDLE and stage.board.running(1) == [])
    assert stage.board.read(1).progress > first.progress


def test_one_of_eight_raises_and_seven_are_answered(stage: Stage) -> None:
    stage.join("Does")

    results = stage.ask(*[{"i": i, **({"do": "raise"} if i == 5 else {})} for i in range(8)])

    assert [r.code for r in results] == ["ok"] * 5 + ["model_error"] + ["ok"] * 2
    assert "ValueError: secret-marker is bad" in results[5].message
    assert value(results[4]) == {"i": 4}
    assert value(results[0]) == {"i": 0}
    stage.until(lambda: "model_failed" in stage.errors())
    assert "secret-marker" not in stage.errors()


@pytest.mark.parametrize("do", ["short", "none", "exit"])
def test_a_model_that_misbehaves_costs_its_batch_but_not_the_worker(stage: Stage, do: str) -> None:
    stage.join("Does", min_batch=1)

    assert [r.code for r in stage.ask({"do": do})] == ["model_error"]
    assert value(stage.ask({"fine": 1})[0]) == {"fine": 1}


def test_queued_work_forms_one_batch_behind_a_running_one(stage: Stage) -> None:
    stage.join("Does", window_ms=0.0)
    stage.send({"do": "wait", "for": str(stage.folder / "go")})
    stage.until(lambda: stage.board.read(1).phase is Phase.BATCH)
    tickets = [stage.send({"i": i})[0] for i in range(5)]
    stage.until(lambda: stage.board.read(1).queued == 5)
    (stage.folder / "go").touch()

    assert {r.batch_size for r in stage.collect(tickets)} == {5}


def test_many_rows_are_split_and_rejoined_in_order(stage: Stage) -> None:
    stage.join("Does", max_batch=32)

    result = stage.ask(list(range(1000)), flags=WorkFlag.MANY)[0]

    assert value(result) == list(range(1000))
    assert result.batch_size == 32


def test_a_suspect_runs_alone(stage: Stage) -> None:
    stage.join("Sized")
    others = stage.send(*range(3))
    alone = stage.send(0, flags=WorkFlag.ALONE)

    assert value(stage.collect(alone)[0]) == 1
    assert [value(r) for r in stage.collect(others)] == [3] * 3


def test_results_that_are_hard_to_encode(stage: Stage) -> None:
    pytest.importorskip("torch")
    stage.join("Weird", min_batch=1)
    stage.ask("f32")  # imports torch; from the next batch on it is in inference mode
    kinds = ["f32", "i64", "bool", "nan", "bf16", "array", "inference", "set", "big"]

    got = dict(zip(kinds, stage.ask(*kinds), strict=True))

    assert [value(got[k]) for k in ("f32", "i64", "bool", "inference")] == [1.5, 7, True, True]
    assert value(got["nan"]) != value(got["nan"])
    assert value(got["bf16"]).tolist() == [1.0, 1.0]
    assert value(got["array"]).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert [got[k].code for k in ("set", "big")] == ["model_error"] * 2


def test_what_a_model_prints_stays_out_of_the_log(stage: Stage) -> None:
    stage.join("Does", min_batch=1)
    stage.ask({"do": "print"})
    assert stage.process is not None
    stage.process.terminate()
    assert stage.wait() == 0

    assert stage.output() == b"printed ? " + b"x" * 5000 + b"\n"
    assert all(line["component"] == "worker" and line["worker"] == 1 for line in stage.log())


def test_out_of_memory_lowers_the_limit_on_the_board(stage: Stage) -> None:
    stage.join("Does", max_batch=8)

    results = stage.ask(*[{"do": "oom", "over": 4, "i": i} for i in range(8)])

    assert [r.code for r in results] == ["ok"] * 8
    stage.until(lambda: stage.board.read(1).batch_limit == 4)
    assert stage.ask({"do": "oom", "over": 0})[0].code == "out_of_memory"
    assert stage.board.read(1).batch_limit == 4


def test_a_broken_device_ends_the_worker_with_its_batch_named(stage: Stage) -> None:
    stage.join("Does")
    tickets = stage.send({"do": "sticky"}, {}, {})

    assert stage.wait() == Exit.REPLACE_ME
    assert stage.board.running(1) == tickets
    assert not stage.router.poll(0)
    assert stage.log()[-1]["event"] == "device_poisoned"


def test_a_deadline_that_passes_while_waiting_is_answered_and_never_started(stage: Stage) -> None:
    stage.join("Does", window_ms=0.0)
    first = stage.send({"do": "wait", "for": str(stage.folder / "go")})
    stage.until(lambda: stage.board.read(1).phase is Phase.BATCH)

    late = stage.ask({}, timeout_s=0.05)[0]

    assert (late.code, late.started) == ("deadline_exceeded", False)
    (stage.folder / "go").touch()
    assert stage.collect(first)[0].code == "ok"


def test_a_cancelled_request_is_answered_and_never_started(stage: Stage) -> None:
    stage.join("Does", window_ms=10_000.0)
    tickets = stage.send({}, {})
    stage.until(lambda: stage.board.read(1).queued == 2)
    stage.router.send_multipart([stage.peer, *link.pack_tickets(link.CANCEL, [tickets[0], 999])])

    result = stage.collect(tickets[:1])[0]

    assert (result.code, result.started) == ("cancelled", False)
    assert stage.board.read(1).queued == 1


def test_the_supervisors_shares_hold_at_once(stage: Stage) -> None:
    stage.join("Sized", max_batch=8, min_batch=8, window_ms=10_000.0)
    stage.board.set_slot(1, SlotWord.SET_BATCH_PPM, 500_000)
    stage.board.set_slot(1, SlotWord.SET_WINDOW_PPM, 200_000)
    stage.until(lambda: stage.board.read(1).batch_limit == 4)

    assert stage.board.read(1).window_ns == 2_000_000_000
    assert [value(r) for r in stage.ask(*range(8))] == [4] * 8


def test_settings_of_a_reload_hold_without_a_restart(stage: Stage) -> None:
    stage.join("Sized", min_batch=8, window_ms=10_000.0)
    stage.send(0)
    new = BatchingSpec(max_batch=3, min_batch=3, window_ms=20.0, adaptive=False)
    stage.channel.send({"t": "settings", "batching": [asdict(new)]})
    stage.until(lambda: stage.board.read(1).batch_limit == 3)

    assert [value(r) for r in stage.ask(1, 2)] == [3, 3]
    assert stage.board.read(1).window_ns == 20_000_000


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stop"])
def test_a_stop_finishes_the_running_batch_and_gives_the_rest_back(stage: Stage, how: str) -> None:
    stage.join("Does", window_ms=0.0)
    running = stage.send({"do": "wait", "for": str(stage.folder / "go")})
    stage.until(lambda: stage.board.read(1).phase is Phase.BATCH)
    waiting = stage.send(1, 2, 3)
    stage.until(lambda: stage.board.read(1).queued == 3)
    assert stage.process is not None

    if how == "stop":
        stage.channel.send({"t": "stop"})
    else:
        stage.process.send_signal(getattr(signal, how))
    stage.collect(waiting)
    assert sorted(stage.returned) == waiting

    crossing = stage.send(4)
    stage.collect(crossing)
    assert stage.returned[-1:] == crossing

    (stage.folder / "go").touch()
    assert stage.collect(running)[0].code == "ok"
    assert stage.wait() == Exit.OK


def test_a_hangup_is_no_stop(stage: Stage) -> None:
    stage.join()
    assert stage.process is not None
    stage.process.send_signal(signal.SIGHUP)

    assert value(stage.ask(5)[0]) == 5


def test_a_model_that_takes_signals_and_leaves_threads_cannot_keep_the_worker(stage: Stage) -> None:
    stage.join("TakesSignals")
    assert stage.process is not None
    stage.process.terminate()

    assert stage.wait() == Exit.OK


def test_helpers_and_forked_children_of_a_model_do_not_touch_the_worker(stage: Stage) -> None:
    stage.join("Does", min_batch=1)

    assert value(stage.ask({"do": "helper"})[0]) == 3
    assert value(stage.ask({"do": "fork"})[0]) == -signal.SIGTERM
    assert value(stage.ask(1)[0]) == 1


def test_a_preprocess_that_never_ends_costs_the_process(stage: Stage) -> None:
    stage.join("Hangs", batch_timeout_s=0.3)
    stage.send(1)

    assert stage.wait() == Exit.REPLACE_ME
    assert "thread_stuck" in stage.errors()
    assert "in preprocess" in stage.errors()  # the dump names the place


def begin_to_wait(stage: Stage, name: str = "go") -> list[int]:
    """Have a preprocess wait until the file `name` is there."""
    file = stage.folder / name
    tickets = stage.send({"for": str(file)})
    stage.until(file.with_suffix(".begun").exists)
    return tickets


def test_while_a_preprocess_takes_its_time_the_worker_hears_and_answers(stage: Stage) -> None:
    stage.join("Waits", window_ms=0.0)
    slow = begin_to_wait(stage)
    behind, other = stage.send(1, 2)
    assert stage.board.running(1) == slow
    stage.until(lambda: stage.board.read(1).queued == 3)

    late = stage.ask(3, timeout_s=0.05)[0]
    assert (late.code, late.started) == ("deadline_exceeded", False)
    stage.router.send_multipart([stage.peer, *link.pack_tickets(link.CANCEL, [*slow, behind])])
    cancelled = stage.collect([behind])[0]
    assert (cancelled.code, cancelled.started) == ("cancelled", False)
    stage.until(lambda: stage.board.read(1).queued == 2)

    (stage.folder / "go").touch()
    assert [r.code for r in stage.collect([*slow, other])] == ["cancelled", "ok"]
    stage.until(lambda: (stage.board.read(1).queued, stage.board.running(1)) == (0, []))


def test_of_several_threads_one_that_waits_holds_up_nobody_and_a_death_names_all_they_have(stage: Stage) -> None:
    stage.join("Waits", window_ms=0.0, preprocess_threads=3)
    slow = begin_to_wait(stage, "a") + begin_to_wait(stage, "b")

    assert [value(r) for r in stage.ask(*range(40))] == list(range(40))
    assert sorted(stage.board.running(1) or ()) == slow
    for name in ("a", "b"):
        (stage.folder / name).touch()
    assert [r.code for r in stage.collect(slow)] == ["ok", "ok"]


def test_a_large_request_is_preprocessed_by_several_threads_and_rejoined_in_order(stage: Stage) -> None:
    stage.join("Waits", max_batch=16, preprocess_threads=4)
    rows = list(range(500))

    assert value(stage.ask(rows, flags=WorkFlag.MANY)[0]) == rows


def test_a_stop_gives_back_what_no_preprocess_has_had_and_answers_the_rest(stage: Stage) -> None:
    stage.join("Waits", max_batch=16, min_batch=3, window_ms=10_000.0, preprocess_threads=2)
    (stage.folder / "open").touch()
    ready = begin_to_wait(stage, "open")  # goes through at once, and waits for its batch
    slow = begin_to_wait(stage, "a") + begin_to_wait(stage, "b")
    behind = stage.send(1, 2)
    stage.until(lambda: stage.board.read(1).queued == 5)

    stage.channel.send({"t": "stop"})
    assert stage.collect(behind) == []
    assert sorted(stage.returned) == behind
    # What was ready runs at once, and is done; a death now is laid at the door of these.
    stage.until(lambda: sorted(stage.board.running(1) or ()) == slow)
    for name in ("a", "b"):
        (stage.folder / name).touch()
    assert [(r.code, r.started) for r in stage.collect(ready + slow)] == [("ok", True)] * 3
    assert stage.wait() == Exit.OK
    assert sorted(stage.returned) == behind


def test_a_stop_ends_when_what_it_waits_for_is_cancelled(stage: Stage) -> None:
    stage.join("Waits", window_ms=0.0)
    slow = begin_to_wait(stage)
    stage.channel.send({"t": "stop"})
    assert stage.receive()[1:] == link.pack_tickets(link.BYE, [])
    stage.router.send_multipart([stage.peer, *link.pack_tickets(link.CANCEL, slow)])
    # What follows on the same connection is heard after it: an answer to it tells that the cancel was heard too.
    (late,) = stage.send(1)
    assert stage.collect([late]) == []
    (stage.folder / "go").touch()

    assert [(r.code, r.started) for r in stage.collect(slow)] == [("cancelled", True)]
    assert stage.wait() == Exit.OK


def test_what_a_preprocess_has_from_the_router_before_is_dropped(stage: Stage) -> None:
    stage.join("Waits", window_ms=0.0)
    begin_to_wait(stage)
    stage.router.close(linger=0)
    stage.board.set(Word.ROUTER_EPOCH, 2)
    stage.router = stage.bind()
    assert stage.welcome().epoch == 2

    (stage.folder / "go").touch()
    assert [value(r) for r in stage.ask(1, 2)] == [1, 2]
    assert set(stage.results) == {2, 3}


def test_a_device_that_breaks_in_a_preprocess_ends_the_worker_with_its_request_named(stage: Stage) -> None:
    stage.join("Waits", preprocess_threads=2)
    tickets = stage.send("sticky")

    assert stage.wait() == Exit.REPLACE_ME
    assert stage.board.running(1) == tickets
    assert stage.log()[-1]["event"] == "device_poisoned"


def test_one_of_several_preprocesses_that_never_ends_costs_the_process(stage: Stage) -> None:
    stage.join("Waits", batch_timeout_s=0.5, preprocess_threads=2)
    hung = begin_to_wait(stage)
    assert [value(r) for r in stage.ask(1, 2)] == [1, 2]

    assert stage.wait() == Exit.REPLACE_ME
    assert stage.board.running(1) == hung


def test_a_stop_is_obeyed_while_a_model_loads(stage: Stage) -> None:
    stage.start("SlowLoad")
    assert stage.process is not None
    assert stage.process.stdout is not None
    assert stage.process.stdout.readline() == b"loading\n"
    assert stage.board.read(1).phase is Phase.LOAD
    stage.process.terminate()

    assert stage.wait() == Exit.OK


def test_a_model_that_cannot_load_is_told_with_its_stage(stage: Stage) -> None:
    stage.start("BadLoad")

    failed = stage.message()

    assert (failed["t"], failed["stage"]) == ("failed", "load")
    assert "OSError: weights are missing" in failed["message"]
    assert "wp_models.py" in failed["traceback"]
    assert stage.wait() == Exit.MODEL_FAILED


def test_a_new_router_gets_a_new_hello_and_of_the_old_ones_work_the_tickets_that_ran_in_vain(stage: Stage) -> None:
    stage.join("Does", window_ms=0.0)
    running = stage.send({"do": "wait", "for": str(stage.folder / "go")})
    stage.until(lambda: stage.board.read(1).phase is Phase.BATCH)
    waiting = stage.send(1, 2)
    stage.until(lambda: stage.board.read(1).queued == 2)

    stage.router.close(linger=0)
    stage.router = stage.bind()
    stage.board.set(Word.ROUTER_EPOCH, 2)

    assert stage.welcome().epoch == 2
    stage.until(lambda: stage.board.read(1).router_epoch == 2)
    assert stage.board.read(1).queued == 0
    (stage.folder / "go").touch()
    assert value(stage.ask(7)[0]) == 7
    stage.until(lambda: running[0] in stage.results)
    late = stage.results[running[0]]
    assert (late.code, late.frames, stage.results.keys() & set(waiting)) == ("cancelled", [], set())


def test_a_hello_that_nobody_answered_is_repeated(stage: Stage) -> None:
    stage.start()
    first = stage.receive()

    assert stage.receive()[1:] == first[1:]


def test_a_lost_supervisor_ends_the_worker_at_once(stage: Stage) -> None:
    stage.join("Does")
    stage.send({"do": "sleep", "s": 60})
    stage.until(lambda: stage.board.read(1).phase is Phase.BATCH)
    stage.channel.close()

    assert stage.wait() == Exit.PARENT_GONE


SPAWNER = """
import os, subprocess, sys
env = dict(os.environ, {parent}=str(os.getpid()))
worker = subprocess.Popen([sys.executable, "-m", "gpupool.worker"], env=env, pass_fds=[int(a) for a in sys.argv[1:]])
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_a_killed_parent_takes_the_worker_along(stage: Stage) -> None:
    fds = [stage._theirs.fileno(), stage.board.fd]
    env = {**os.environ, CHANNEL_FD: str(fds[0]), BOARD_FD: str(fds[1])}
    command = [sys.executable, "-c", SPAWNER.format(parent=ENV_PARENT), *map(str, fds)]
    with subprocess.Popen(command, env=env, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as spawner:
        assert spawner.stdout is not None
        pidfd = os.pidfd_open(int(spawner.stdout.readline()))
        assert stage.channel.send(to_message(stage.spec("Does")))
        stage.welcome()
        stage.send({"do": "sleep", "s": 60})
        stage.until(lambda: stage.board.read(1).phase is Phase.BATCH)
        spawner.kill()

    assert select.select([pidfd], [], [], DEADLINE_S)[0]
    os.close(pidfd)


def test_a_worker_started_by_hand_says_so(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "gpupool.worker"], capture_output=True, timeout=DEADLINE_S, check=False)

    assert done.returncode == Exit.USAGE
    assert b"gpupool serve" in done.stderr


def test_a_cpu_worker_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = "import sys, gpupool.worker.__main__; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=DEADLINE_S, check=True)

    assert done.stdout == b"[]\n"


def test_a_worker_whose_connection_breaks_while_its_router_lives_asks_to_be_replaced(stage: Stage) -> None:
    stage.join()
    stage.router.close(0)
    stage.router = stage.bind()  # the same router, to which the worker's next connection is a stranger
    assert stage.process is not None
    until = time.monotonic() + DEADLINE_S
    while stage.process.poll() is None:
        assert time.monotonic() < until, "it goes on as if it heard"
        stage.board.set(Word.ROUTER_BEAT_NS, time.monotonic_ns())
        time.sleep(0.05)

    assert stage.process.returncode == Exit.REPLACE_ME
    assert "link_cut" in stage.errors()


def test_a_worker_whose_router_is_dead_waits_for_the_next(stage: Stage) -> None:
    stage.join()
    stage.board.set(Word.ROUTER_BEAT_NS, time.monotonic_ns())
    stage.router.close(0)
    assert stage.process is not None
    until = time.monotonic() + 1.5 * CUT_S  # longer than it waits for a reason; the router's beat stands still
    while time.monotonic() < until:
        assert stage.process.poll() is None
        time.sleep(0.05)
    stage.router = stage.bind()
    stage.board.set(Word.ROUTER_EPOCH, 2)

    assert stage.welcome().epoch == 2
    assert value(stage.ask({"a": 1})[0]) == {"a": 1}
