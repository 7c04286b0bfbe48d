"""A profile on demand: what the next batches' forward spends its time on, by torch's profiler where the process has torch, else by Python's.

Off, it costs the work loop one look at a flag. On, the profiler records inside the work loop, because torch's belongs to the thread that it was
started on; it ends after its batches, when its time is up although no batch comes, or when its records take too much of this process's
memory. Whatever goes wrong with it is told to who asked, and no request fails by it. The files are written on a thread of their own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from gpupool.logs import Log

from .recorders import PythonRecorder, Recorder, TorchRecorder
from .recording_guard import RecordingGuard

#: Records of one profile, and what to reckon with for each of them, in bytes. Measured: 3 to 6 kB from recording to the table (torch 2.13);
#: an operator called from Python makes 1 to 12 of them, `y + 1` five.
_MOST_RECORDS: Final = 50_000
_RECORD_BYTES: Final = 16 << 10
_LEAST_ROOM_BYTES: Final = 64 << 20
#: What recording itself may take, as a share of the room: measured, 0.3 to 0.5 kB a record, and 11 times that when it has ended.
_RECORDING_SHARE: Final = 24
#: A profile that leaves less than this share of the room it found has used the process up: what malloc got it seldom gives back.
_USED_UP_SHARE: Final = 4

Result = TypeVar("Result")


class _Job:
    """One order under way; `ended` says why it stopped recording."""

    def __init__(
        self, number: int, path: str, batches: int, seconds: float, make: Callable[[], Recorder], room: int | None
    ) -> None:
        self.number, self.path, self.batches, self.seconds = number, path, batches, seconds
        self.make = make
        self.recorder = make()
        self.room = room
        self.guard: RecordingGuard | None = None
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
        recycle: takes the reason, when a profile has left so little memory that a new process should take this one's place.
        last_batch_s: how long to wait, when the time is up, for a batch that runs then.
    """

    def __init__(
        self,
        room: Callable[[], int | None],
        between: Callable[[Callable[[], None]], None],
        answer: Callable[[dict[str, Any]], object],
        recycle: Callable[[str], object],
        log: Log,
        *,
        card: bool,
        last_batch_s: float,
    ) -> None:
        self._card = card
        self._room = room
        self._between = between
        self._answer = answer
        self._recycle = recycle
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
                self._start(job)
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

    def _start(self, job: _Job) -> None:
        if job.recorder.grows:
            room = _MOST_RECORDS * _RECORD_BYTES if job.room is None else job.room
            job.guard = RecordingGuard(room // _RECORDING_SHARE, lambda: self._outgrown(job))
            job.guard.start()
        job.started = True
        job.recorder.start()

    def _outgrown(self, job: _Job) -> None:
        """End it in the midst of a batch, which goes on."""
        if self._job is not job:
            return
        try:
            job.recorder.end()
        except Exception as e:
            self._stop(job, "failed", error=_words(e))
            return
        if job.seen:
            self._stop(job, "memory")
        else:
            self._stop(job, "failed", error="one batch makes more records than this worker has memory for")

    def _ran(self, job: _Job) -> None:
        if self._job is not job:
            return  # ended in its midst
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
        """See what one batch records, and begin anew with as many as there is room for. Raises MemoryError: not for one."""
        self._unguard(job)
        job.recorder.stop()
        records = job.recorder.count()
        most = _MOST_RECORDS if job.room is None else min(_MOST_RECORDS, job.room // _RECORD_BYTES)
        job.started, job.recorder = False, job.make()
        if records > most:
            raise MemoryError(f"one batch makes {records} records, and this worker has memory for {most}")
        job.allowed = most // records if records else job.batches

    def _unguard(self, job: _Job) -> None:
        if job.guard is not None:
            job.guard.stop()
            job.guard = None

    def _stop(self, job: _Job, why: str, error: str = "") -> None:
        """End recording, on the work loop's thread; once."""
        if self._job is not job:
            return
        self._job = None
        job.ended, job.error = why, error
        self._unguard(job)
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
            self._look_for_lost_memory(job)

    def _look_for_lost_memory(self, job: _Job) -> None:
        room = self._room()
        if room is not None and job.room is not None and room < job.room / _USED_UP_SHARE:
            self._recycle(f"a profile has left {max(0, room) >> 20} MiB of the {job.room >> 20} MiB that were free")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
