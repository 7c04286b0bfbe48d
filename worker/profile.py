"""A profile on demand: what the next batches' forward spends its time on, by torch's profiler where the process has torch, else by Python's.

Off, it costs the work loop one look at a flag. On, the profiler records inside the work loop, because torch's belongs to the thread that it was
started on; it ends after its batches, when its time is up although no batch comes, or when its records take too much of this process's
memory. Whatever goes wrong with it is told to who asked, and no request fails by it. The files are written on a thread of their own.

torch.autograd.profiler and not torch.profiler, which is the same recorder and imports 800 modules more at its first start: 0.9 s in the work
loop and 77 MiB of a worker's budget (torch 2.13).
"""

from __future__ import annotations

import cProfile
import gzip
import pstats
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from gpupool.logs import Log

#: Lines of the table, and characters of a name in it.
LINES: Final = 20
_NAME_CHARS: Final = 120
#: Records of one profile, and what to reckon with for each of them, in bytes. Measured: 6 kB from recording to the table (torch 2.13).
#: torch's own table takes 3.6 kB more, and ended a worker with 200 MB of room.
_MOST_RECORDS: Final = 50_000
_RECORD_BYTES: Final = 16 << 10
_LEAST_ROOM_BYTES: Final = 64 << 20
#: torch writes the values of numbers among an operator's arguments, which may be a client's. Shapes may stay.
_VALUES: Final = re.compile(r'"Concrete Inputs": \[(?:"(?:[^"\\]|\\.)*"(?:, ?)?)*\]')

Operator = dict[str, Any]
Result = TypeVar("Result")


class Recorder(Protocol):
    """One profiler: all but `write` is called on the work loop's thread."""

    kind: str

    def start(self) -> None:
        """Begin, before the first batch."""

    def begin(self, name: str) -> None:
        """A batch begins."""

    def end(self) -> None:
        """It has ended."""

    def stop(self) -> None:
        """No more batches."""

    def count(self) -> int:
        """Return how many records there are, where each takes memory. After `stop`."""

    def write(self, path: Path) -> tuple[Path, list[Operator]]:
        """Write the file, beside the given path with an ending of its own, and sum up; most expensive first."""


class TorchRecorder:
    """torch's profiler: operators of this thread, and kernels where there is a card."""

    kind = "torch"

    def __init__(self, torch: Any, *, on_card: bool) -> None:
        self._on_card = on_card
        self._name_of = torch.autograd.profiler.record_function
        self._profile = torch.autograd.profiler.profile(
            use_kineto=True, use_device="cuda" if on_card else None, record_shapes=True
        )  # fmt: skip
        self._batch: Any = None

    def start(self) -> None:
        """Begin."""
        self._profile.__enter__()

    def begin(self, name: str) -> None:
        """Give the batch a span of its own in the trace."""
        self._batch = self._name_of(name)
        self._batch.__enter__()

    def end(self) -> None:
        """End the span."""
        self._batch.__exit__(None, None, None)

    def stop(self) -> None:
        """End recording."""
        self._profile.__exit__(None, None, None)

    def write(self, path: Path) -> tuple[Path, list[Operator]]:
        """Write a Chrome trace, without values."""
        file, raw, new = (path.with_name(f"{path.name}{ending}") for ending in (".json.gz", ".new.json", ".new.gz"))
        try:
            self._profile.export_chrome_trace(str(raw))
            with raw.open(encoding="utf-8", errors="replace") as lines, gzip.open(new, "wt", encoding="utf-8") as packed:
                packed.writelines(_VALUES.sub('"Concrete Inputs": []', line) for line in lines)
            new.replace(file)
        finally:
            raw.unlink(missing_ok=True)
            new.unlink(missing_ok=True)
        return file, _dearest(_summed(self._profile.kineto_results.events(), on_card=self._on_card))

    def count(self) -> int:
        """Return how many operators and kernels were recorded."""
        return len(self._profile.kineto_results.events())


class PythonRecorder:
    """Python's own profiler, where there is no torch: functions of this thread."""

    kind = "python"

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def start(self) -> None:
        """Nothing: it runs while a batch does."""

    def begin(self, name: str) -> None:  # noqa: ARG002 - it has no spans
        """Record from now on."""
        self._profile.enable()

    def end(self) -> None:
        """Record no more."""
        self._profile.disable()

    def stop(self) -> None:
        """Leave nothing on, should a batch's end have failed."""
        self._profile.disable()

    def count(self) -> int:
        """Return 0: it keeps sums only."""
        return 0

    def write(self, path: Path) -> tuple[Path, list[Operator]]:
        """Write what `python -m pstats` reads."""
        file, new = path.with_name(f"{path.name}.pstats"), path.with_name(f"{path.name}.new.pstats")
        try:
            self._profile.dump_stats(new)
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
        stats: Any = pstats.Stats(self._profile)
        rows = [
            {
                "name": (f"{place[0]}:{place[1]} {place[2]}" if place[1] else place[2])[-_NAME_CHARS:], "calls": calls,
                "self_ms": own * 1000, "total_ms": total * 1000, "device_ms": None,
            }
            for place, (_, calls, own, total, _) in stats.stats.items()
        ]  # fmt: skip
        return file, _dearest(rows)


class _Job:
    """One order under way; `ended` says why it stopped recording."""

    def __init__(
        self, number: int, path: str, batches: int, seconds: float, make: Callable[[], Recorder], room: int | None
    ) -> None:
        self.number, self.path, self.batches, self.seconds = number, path, batches, seconds
        self.make = make
        self.recorder = make()
        self.room = room
        self.started = False
        #: Batches that memory allows; None: the first batch is being recorded to see how many records one makes, and thrown away.
        self.allowed: int | None = None
        self.seen = 0
        self.ended = ""
        self.error = ""
        self.over = threading.Event()


class Profiles:
    """Takes profiles, one at a time.

    Args:
        card: whether the device is one.
        room: memory that this process may still take, in bytes; None: there is no limit.
        between: has the work loop call something between two batches, at once when it waits.
        answer: takes the answer to the order.
    """

    def __init__(
        self,
        room: Callable[[], int | None],
        between: Callable[[Callable[[], None]], None],
        answer: Callable[[dict[str, Any]], object],
        log: Log,
        *,
        card: bool,
        last_batch_s: float,
    ) -> None:
        self._card = card
        self._room = room
        self._between = between
        self._answer = answer
        self._log = log
        self._last_batch_s = last_batch_s
        self._busy = threading.Lock()
        self._job: _Job | None = None

    @property
    def on(self) -> bool:
        """Whether the next batch is to be run through `run`."""
        return self._job is not None

    def order(self, number: int, path: str, batches: int, seconds: float) -> None:
        """Begin one with the next batch; the answer comes when it is written, or says why it is not. Returns at once."""
        if not self._busy.acquire(blocking=False):
            self._answer({"t": "answer", "n": number, "error": "another profile is being taken"})
            return
        try:
            job = self._job = self._prepare(number, path, batches, seconds)
            threading.Thread(target=self._follow, args=(job,), name="profile", daemon=True).start()
        except Exception as e:  # torch, or no memory for a thread
            self._job = None
            self._busy.release()
            self._answer({"t": "answer", "n": number, "error": _words(e)})
            return
        self._log.event.info("profile_begun", path=path, batches=batches, seconds=seconds, profiler=job.recorder.kind)

    def run(self, name: str, work: Callable[[], Result]) -> Result:
        """Run a batch, and record it if one is to be recorded (on the work loop's thread). Raises what the batch raises."""
        job = self._job
        if job is None:
            return work()
        try:
            if not job.started:
                job.recorder.start()
                job.started = True
            job.recorder.begin(name)
        except Exception as e:
            self._stop(job, "failed", error=_words(e))
            return work()
        try:
            return work()
        finally:
            self._ran(job)

    def _prepare(self, number: int, path: str, batches: int, seconds: float) -> _Job:
        room = self._room()
        if room is not None and room < _LEAST_ROOM_BYTES:
            raise MemoryError(f"{room >> 20} MiB are left of this worker's memory, a profile needs {_LEAST_ROOM_BYTES >> 20}")
        torch = sys.modules.get("torch")

        def make() -> Recorder:
            return PythonRecorder() if torch is None else TorchRecorder(torch, on_card=self._card)

        return _Job(number, path, batches, seconds, make, room)

    def _ran(self, job: _Job) -> None:
        try:
            job.recorder.end()
            if job.allowed is None:
                self._size_up(job)
                return
            job.seen += 1
            room = self._room()
        except Exception as e:
            self._stop(job, "failed", error=_words(e))
            return
        if job.seen >= job.batches:
            self._stop(job, "batches")
        elif job.seen >= job.allowed or (room is not None and job.room is not None and room < job.room / 2):
            self._stop(job, "memory")

    def _size_up(self, job: _Job) -> None:
        """See what one batch records, and begin anew with as many as there is room for: at least one."""
        job.recorder.stop()
        records = job.recorder.count()
        most = _MOST_RECORDS if job.room is None else min(_MOST_RECORDS, job.room // _RECORD_BYTES)
        job.started, job.recorder = False, job.make()
        job.allowed = max(1, most // max(1, records)) if records else job.batches

    def _stop(self, job: _Job, why: str, error: str = "") -> None:
        """End recording, on the work loop's thread; once."""
        if self._job is not job:
            return
        self._job = None
        job.ended, job.error = why, error
        try:
            if job.started:
                job.started = False
                job.recorder.stop()
        except Exception as e:
            job.error = job.error or _words(e)
        job.over.set()

    def _follow(self, job: _Job) -> None:
        """See one order to its end."""
        answer: dict[str, Any] = {"t": "answer", "n": job.number, "profiler": job.recorder.kind}
        try:
            if not job.over.wait(job.seconds):
                self._between(lambda: self._stop(job, "time"))
                if not job.over.wait(self._last_batch_s):
                    raise TimeoutError(f"a batch still runs after {self._last_batch_s:g} s more")
            if job.error:
                raise RuntimeError(job.error)
            answer |= {"batches": job.seen, "ended": job.ended, "file": None, "operators": []}
            if job.seen:
                file, answer["operators"] = job.recorder.write(Path(job.path))
                answer["file"] = str(file)
            self._log.event.info("profile_written", path=answer["file"], batches=job.seen, ended=job.ended)
        except Exception as e:  # the disk, the memory, torch: it must not end the worker
            answer["error"] = job.error or _words(e)
            self._log.event.error("profile_failed", error=answer["error"])
        finally:
            if job.over.is_set():  # else a batch hangs, and until it has ended there is no other profile
                self._busy.release()
            self._answer(answer)
            if not job.over.is_set():
                job.over.wait()
                self._busy.release()


def _summed(events: Sequence[Any], *, on_card: bool) -> list[Operator]:
    """Sum up torch's events by name; a host operator's own time is without that of those within it. Kernels have rows of their own."""
    host, rows = [], {}
    for event in events:
        name, length = str(event.name())[:_NAME_CHARS], event.duration_ns()
        row = rows.setdefault(
            name, {"name": name, "calls": 0, "self_ms": 0.0, "total_ms": 0.0, "device_ms": 0.0 if on_card else None}
        )
        row["calls"] += 1
        if event.device_type().name == "CPU":
            row["total_ms"] += length / 1e6
            host.append((event.start_thread_id(), event.start_ns(), -length, name))
        elif on_card:
            row["device_ms"] += length / 1e6
    host.sort()  # whoever contains others stands before them
    outer: list[tuple[int, int, str]] = []  # thread, end and name of those that are open
    for thread, start, minus_length, name in host:
        end = start - minus_length
        while outer and (outer[-1][0] != thread or outer[-1][1] <= start):
            outer.pop()
        rows[name]["self_ms"] -= minus_length / 1e6
        if outer:
            rows[outer[-1][2]]["self_ms"] += minus_length / 1e6
        outer.append((thread, end, name))
    return list(rows.values())


def _dearest(rows: list[Operator]) -> list[Operator]:
    rows.sort(key=lambda row: (row["device_ms"] or 0.0, row["self_ms"]), reverse=True)
    for row in rows[:LINES]:
        row |= {key: round(row[key], 3) for key in ("self_ms", "total_ms", "device_ms") if row[key] is not None}
    return rows[:LINES]


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
