"""Profiles: how many batches, how they end, and that nothing of theirs fails a batch."""

from __future__ import annotations

import gzip
import json
import pstats
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpupool.logs import Log
from gpupool.worker.profile import Profiles
from gpupool.worker.recorders import LINES

MIB = 1 << 20


class Bench:
    """A work loop by hand: `errands` are what it is asked to do between two batches."""

    def __init__(self, room: Callable[[], int | None] = lambda: None, last_batch_s: float = 20.0) -> None:
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.errands: queue.Queue[Callable[[], None]] = queue.Queue()
        self.recycled: queue.Queue[str] = queue.Queue()
        log = SimpleNamespace(event=SimpleNamespace(info=lambda *_, **__: None, error=lambda *_, **__: None))
        self.profiles = Profiles(
            room, self.errands.put, self.answers.put, self.recycled.put, cast("Log", log), card=False, last_batch_s=last_batch_s
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        return self.answers.get(timeout=30)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("gpupool.worker.recorders._THREADS_APART", True)  # here no other thread works


def marked_work() -> int:
    return sum(range(1000))


def test_off_it_is_off_and_changes_no_batch() -> None:
    bench = Bench()

    assert not bench.profiles.on
    assert bench.profiles.run("a batch", marked_work) == marked_work()


@pytest.mark.usefixtures("no_torch")
def test_without_torch_pythons_profiler_names_the_functions(tmp_path: Path) -> None:
    bench = Bench()
    bench.profiles.order(7, str(tmp_path / "p"), batches=2, seconds=60)
    assert bench.profiles.on
    for _ in range(4):  # the first is only sized up
        bench.profiles.run("a batch", marked_work)

    answer = bench.answer()
    assert not bench.profiles.on
    assert {key: answer[key] for key in ("n", "profiler", "batches", "ended")} == {
        "n": 7, "profiler": "python", "batches": 2, "ended": "batches",
    }  # fmt: skip
    mine = [row for row in answer["operators"] if "marked_work" in row["name"]]
    assert [row["calls"] for row in mine] == [2]
    assert any("marked_work" in place[2] for place in cast("Any", pstats.Stats(answer["file"])).stats)
    assert [path.name for path in tmp_path.iterdir()] == ["p.pstats"]


def test_torchs_trace_has_the_operators_and_no_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights = torch.ones(3, 3)

    def forward() -> Any:
        with torch.inference_mode():
            return torch.full((2, 3), 42.4242) @ weights

    bench = Bench()
    bench.profiles.order(1, str(tmp_path / "p"), batches=2, seconds=60)
    for _ in range(3):  # the first is only sized up
        bench.profiles.run("gpupool: a batch of toy", forward)

    answer = bench.answer()
    text = gzip.decompress((tmp_path / "p.json.gz").read_bytes()).decode()
    events = [e for e in json.loads(text)["traceEvents"] if e.get("ph") == "X"]
    names = [event["name"] for event in events]
    assert names.count("aten::matmul") == 2
    assert names.count("gpupool: a batch of toy") == 2
    assert any(event["args"].get("Input Dims") == [[2, 3], [3, 3]] for event in events if event["name"] == "aten::matmul")
    assert "42.4242" not in text
    rows = {row["name"]: row for row in answer["operators"]}
    assert rows["aten::matmul"]["calls"] == 2
    assert rows["aten::matmul"]["device_ms"] is None
    assert len(rows) <= LINES
    assert [path.name for path in tmp_path.iterdir()] == ["p.json.gz"]


def test_when_the_time_is_up_it_ends_though_no_batch_comes(tmp_path: Path) -> None:
    bench = Bench()
    bench.profiles.order(1, str(tmp_path / "p"), batches=5, seconds=0.01)
    bench.errands.get(timeout=30)()

    answer = bench.answer()
    assert (answer["batches"], answer["ended"], answer["file"]) == (0, "time", None)
    assert not bench.profiles.on


@pytest.mark.usefixtures("no_torch")
def test_when_memory_shrinks_to_half_it_ends(tmp_path: Path) -> None:
    room = [200 * MIB]
    bench = Bench(lambda: room[0])
    bench.profiles.order(1, str(tmp_path / "p"), batches=1000, seconds=60)
    for _ in range(2):
        bench.profiles.run("a batch", marked_work)
    room[0] = 99 * MIB
    bench.profiles.run("a batch", marked_work)

    answer = bench.answer()
    assert (answer["batches"], answer["ended"]) == (2, "memory")


def negations(count: int) -> Callable[[], str]:
    """A batch that makes a record for each of so many calls of an operator."""
    torch = pytest.importorskip("torch")
    one = torch.ones(1)

    def forward() -> str:
        with torch.inference_mode():
            for _ in range(count):
                torch.neg(one)
        return "done"

    return forward


def test_no_more_batches_are_recorded_than_there_is_room_for(tmp_path: Path) -> None:
    """64 MiB are room for 4096 records at 16 KiB; the first batch shows that one makes some thousand."""
    forward = negations(1500)
    bench = Bench(lambda: 64 * MIB)
    bench.profiles.order(1, str(tmp_path / "p"), batches=1000, seconds=60)
    while bench.profiles.on:
        bench.profiles.run("a batch", forward)

    answer = bench.answer()
    assert (answer["batches"], answer["ended"]) == (2, "memory")
    rows = {row["name"]: row for row in answer["operators"]}
    assert rows["aten::neg"]["calls"] == 3000
    assert rows["a batch"]["total_ms"] >= rows["a batch"]["self_ms"] + rows["aten::neg"]["self_ms"] - 0.01


def test_a_batch_that_makes_more_records_than_there_is_room_for_is_not_recorded(tmp_path: Path) -> None:
    """64 MiB are room for 4096 records: 4500 are less than what ends it in its midst, and more than there is room for."""
    forward = negations(4500)
    bench = Bench(lambda: 64 * MIB)
    bench.profiles.order(1, str(tmp_path / "p"), batches=5, seconds=60)

    assert bench.profiles.run("a batch", forward) == "done"
    assert "memory for 4096" in bench.answer()["error"]
    assert not bench.profiles.on
    assert bench.profiles.run("a batch", forward) == "done"


#: In a process of its own, whose data has a limit: unbounded, the records of one such batch take 1.2 GB.
ENDLESS = """
import queue, resource, sys
from types import SimpleNamespace
import torch
from gpupool.worker.profile import Profiles

def data():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))

torch.set_num_threads(1)
limit = data() + (200 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
answers, one = queue.Queue(), torch.ones(4)
quiet = SimpleNamespace(event=SimpleNamespace(info=lambda *_, **__: None, error=lambda *_, **__: None))
profiles = Profiles(lambda: limit - data(), lambda f: f(), answers.put, print, quiet, card=False, last_batch_s=30)

def forward():
    y = one
    for _ in range(100_000):
        y = y + 1
    return float(y[0])

for number in range(2):
    profiles.order(number, sys.argv[1], 3, 60.0)
    assert profiles.run("a batch", forward) == 100_001.0
    assert not profiles.on
    assert "more records" in (answer := answers.get(timeout=60))["error"], answer
    assert limit - data() > 50 << 20, limit - data()
"""


def test_a_batch_of_very_many_operators_ends_the_recording_and_not_the_worker(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "p")], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_torch")
def test_one_that_leaves_next_to_nothing_asks_for_a_new_process(tmp_path: Path) -> None:
    room = [200 * MIB]
    bench = Bench(lambda: room[0])
    bench.profiles.order(1, str(tmp_path / "p"), batches=1000, seconds=60)
    bench.profiles.run("a batch", marked_work)
    room[0] = 49 * MIB
    bench.profiles.run("a batch", marked_work)

    assert bench.answer()["ended"] == "memory"
    assert bench.recycled.get(timeout=30) == "a profile has left 49 MiB of the 200 MiB that were free"


@pytest.mark.usefixtures("no_torch")
def test_where_pythons_profiler_would_record_other_threads_too_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpupool.worker.recorders._THREADS_APART", False)
    bench = Bench()
    bench.profiles.order(1, str(tmp_path / "p"), batches=1, seconds=60)

    assert "all threads from Python 3.12" in bench.answer()["error"]
    assert not bench.profiles.on


def test_a_worker_with_little_memory_left_is_not_profiled(tmp_path: Path) -> None:
    bench = Bench(lambda: 10 * MIB)
    bench.profiles.order(1, str(tmp_path / "p"), batches=1, seconds=60)

    assert "10 MiB are left" in bench.answer()["error"]
    assert not bench.profiles.on


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("part", ["begin", "end"])
def test_a_profiler_that_raises_fails_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the profiler is broken")

    monkeypatch.setattr(f"gpupool.worker.recorders.PythonRecorder.{part}", fail)
    bench = Bench()
    bench.profiles.order(1, str(tmp_path / "p"), batches=5, seconds=60)

    assert bench.profiles.run("a batch", marked_work) == marked_work()
    assert "the profiler is broken" in bench.answer()["error"]
    assert bench.profiles.run("a batch", marked_work) == marked_work()


@pytest.mark.usefixtures("no_torch")
def test_a_batch_that_raises_raises_as_it_is_and_counts(tmp_path: Path) -> None:
    bench = Bench()
    bench.profiles.order(1, str(tmp_path / "p"), batches=1, seconds=60)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bench.profiles.run("a batch", lambda: 1 // 0)

    assert bench.answer()["batches"] == 1


def test_one_at_a_time_and_a_hung_batch_is_told(tmp_path: Path) -> None:
    bench = Bench(last_batch_s=0.01)
    bench.profiles.order(1, str(tmp_path / "p"), batches=1, seconds=0.01)
    hung = bench.answer()
    bench.profiles.order(2, str(tmp_path / "q"), batches=1, seconds=0.01)
    refused = bench.answer()
    bench.errands.get(timeout=30)()  # the batch has ended after all

    assert "still runs" in hung["error"]
    assert "another profile" in refused["error"]
    for thread in threading.enumerate():
        if thread.name == "profile":
            thread.join(30)
    bench.profiles.order(3, str(tmp_path / "r"), batches=1, seconds=0.01)
    bench.errands.get(timeout=30)()
    assert bench.answer()["n"] == 3


@pytest.mark.usefixtures("no_torch")
def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    bench = Bench()
    bench.profiles.order(1, str(tmp_path / "missing" / "p"), batches=1, seconds=60)
    for _ in range(2):
        bench.profiles.run("a batch", marked_work)

    assert bench.answer()["error"].startswith("FileNotFoundError")
