"""The supervisor's journal: taps the log for what the pool did and why, keeps it at hand and in a file, and answers `events`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gpupool.journal import KEPT, LEVELS, Wanted
from gpupool.journal_file import JournalFile, link, read
from gpupool.log_queue import Record
from gpupool.log_sink import iso
from gpupool.logs import Log

from .control import Refused
from .journal import Journal

#: Records that may wait for another thread to be through, or for the call that a finalizer has interrupted.
_WAITING: Final = 1000


class Chronicle:
    """The journal of one supervisor, from now until `close`; `devices` are ids by slot. What an earlier one wrote is taken over."""

    def __init__(self, log: Log, path: Path, runtime: Path, devices: Sequence[str]) -> None:
        self._log = log
        self._journal = Journal(devices, now=time.time())
        # Threads log, too, and so do finalizers, while this very thread holds the lock: who logs never waits for it, whoever has it keeps all.
        self._lock = threading.Lock()
        self._waiting: deque[Record] = deque()
        self._unkept = 0
        problem = ""
        try:
            self._journal.restore(read(path) or ())
        except OSError as e:
            problem = f"{path} cannot be read: {e.strerror or e}; what happened before is not known"
        last = self._journal.broken_off()
        self._file = JournalFile(path)
        link(runtime, path)
        log.tap = self._note
        if problem:
            log.event.warning("journal_not_read", problem=problem)
        if last:  # SIGKILL, want of memory, the host: it could not say so itself
            at = iso(last["time"]) if "time" in last else ""
            log.event.warning("earlier_supervisor_died", last_event=str(last.get("event")), last_at=at)

    def close(self) -> None:
        """Write what waits, for a bounded time."""
        self._log.tap = None
        self._file.close()

    def answer(self, args: dict[str, Any]) -> dict[str, Any]:
        """Answer the verb: `limit` (1 to 1000), `worker`, `level`, `since_s` (so many seconds back), `after` (a number).

        Raises:
            Refused: an argument is not to be understood.
        """
        limit, level, worker = args.get("limit", 50), args.get("level", "info"), args.get("worker")
        since_s, after = args.get("since_s"), args.get("after", 0)
        if not isinstance(limit, int) or not 1 <= limit <= KEPT:
            raise Refused("bad_request", f"limit: expected an integer from 1 to {KEPT}")
        if not isinstance(level, str) or level not in LEVELS:
            raise Refused("bad_request", f"level: expected one of {', '.join(LEVELS)}")
        if since_s is not None and (not isinstance(since_s, int | float) or not since_s >= 0):
            raise Refused("bad_request", "since_s: expected a number of seconds")
        if not isinstance(after, int):
            raise Refused("bad_request", "after: expected the number of an event")
        journal = self._journal
        wanted = Wanted(
            None if worker is None else str(worker), level, 0.0 if since_s is None else time.time() - since_s,
            after if after <= journal.last else 0,  # of numbers that a clock set back, and a lost file, have taken with them
        )  # fmt: skip
        with self._lock:
            self._keep()
            events, last = journal.select(wanted, limit), journal.last
        self._settle()
        return {"events": events, "last": last, "dropped": self._unkept + self._file.dropped, "file": str(self._file.path)}

    def _note(self, record: Record) -> None:
        if len(self._waiting) >= _WAITING:
            self._unkept += 1
            return
        self._waiting.append(record)
        self._settle()

    def _settle(self) -> None:
        # Looked at again after each release: what came in between found the lock taken.
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                self._keep()
            finally:
                self._lock.release()

    def _keep(self) -> None:
        while self._waiting:
            try:
                line = self._journal.add(self._waiting.popleft())
            except Exception:  # one record that cannot be kept must not end who logged it
                self._unkept += 1
                continue
            if line is not None:
                self._file.put(line)
