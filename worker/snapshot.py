"""A memory snapshot on demand: trace allocations for a while, then write down what was allocated since and is still held.

Tracing costs (tracemalloc: Python code that allocates runs at about half its speed), so it begins with the order and ends with the file;
otherwise nothing is on. What is written down is taken between two batches, when nothing of a batch is alive, and no batch is cut while it is
taken. On a card torch's allocator history goes into a second file beside the first, for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from gpupool.logs import Log

#: Frames of each allocation, and lines of the report: where, not every byte.
FRAMES: Final = 16
LINES: Final = 100
#: Entries of torch's history: about 100 MiB of file at the most.
_CARD_ENTRIES: Final = 100_000


class Snapshots:
    """Takes snapshots, one at a time, on a thread of their own.

    Args:
        about: what else to write down, plain values.
        card: torch, where the device is a card; else None. Asked when it is needed: a model imports it late.
        between_batches: no batch begins inside; False when one still runs, and the snapshot is taken under way, and says so.
        answer: takes the answer to the order.
    """

    def __init__(
        self,
        about: Callable[[], dict[str, Any]],
        card: Callable[[], Any],
        between_batches: Callable[[], AbstractContextManager[bool]],
        answer: Callable[[dict[str, Any]], object],
        log: Log,
    ) -> None:
        self._about = about
        self._card = card
        self._between_batches = between_batches
        self._answer = answer
        self._log = log
        self._busy = threading.Lock()

    def order(self, number: int, path: str, seconds: float) -> None:
        """Begin one; the answer comes when it is written, or says why it is not. Returns at once."""
        if not self._busy.acquire(blocking=False):
            self._answer({"t": "answer", "n": number, "error": "another snapshot is being taken"})
            return
        self._log.event.info("snapshot_begun", path=path, seconds=seconds)
        try:
            threading.Thread(target=self._run, args=(number, Path(path), seconds), name="snapshot", daemon=True).start()
        except (RuntimeError, MemoryError) as e:  # no memory for a thread, which is when one wants to know
            self._busy.release()
            self._answer({"t": "answer", "n": number, "error": f"no thread can be started: {e}"})

    def _run(self, number: int, path: Path, seconds: float) -> None:
        answer: dict[str, Any] = {"t": "answer", "n": number}
        try:
            answer |= self._take(path, seconds)
            self._log.event.info("snapshot_written", path=str(path))
        except Exception as e:  # the disk, the memory, torch: it must not end the worker
            answer["error"] = f"{type(e).__name__}: {e}"[:500]
            self._log.event.error("snapshot_failed", error=answer["error"])
        finally:
            self._busy.release()
            self._answer(answer)

    def _take(self, path: Path, seconds: float) -> dict[str, Any]:
        memory = getattr(getattr(self._card(), "cuda", None), "memory", None)
        ours = not tracemalloc.is_tracing()  # a model may trace for itself
        try:
            if ours:
                tracemalloc.start(FRAMES)
            if memory is not None:
                memory._record_memory_history(max_entries=_CARD_ENTRIES)  # noqa: SLF001 - torch has no other name for it
            time.sleep(seconds)
            # Requests wait meanwhile: only what must be of one moment is taken here, and written down after.
            with self._between_batches() as at_rest:
                snapshot = tracemalloc.take_snapshot()
                traced, peak = tracemalloc.get_traced_memory()
                history = None if memory is None else memory._snapshot()  # noqa: SLF001
        finally:
            if ours:
                tracemalloc.stop()
            if memory is not None:
                memory._record_memory_history(enabled=None)  # noqa: SLF001
        ignored = [tracemalloc.Filter(inclusive=False, filename_pattern=tracemalloc.__file__)]
        lines = snapshot.filter_traces(ignored).statistics("traceback")
        document = {
            **self._about(),
            "at": time.time(),
            "between_batches": at_rest,
            "traced_s": seconds,
            "python": sys.version.split()[0],
            "allocated_and_held_bytes": traced,
            "peak_bytes": peak,
            "places": len(lines),
            "largest": [
                {"bytes": s.size, "blocks": s.count, "where": [f"{f.filename}:{f.lineno}" for f in reversed(s.traceback)]}
                for s in lines[:LINES]
            ],
        }
        files = [str(path)]
        if history is not None:
            files.append(f"{path}.pickle")
            with _replacing(Path(files[1])) as file:
                pickle.dump(
                    history, file
                )  # as torch's own _dump_snapshot does; into the file piece by piece, so that others get their turns
        with _replacing(path) as file:
            file.write(json.dumps(document, indent=1).encode() + b"\n")
        return {"files": files, "allocated_and_held_bytes": traced, "places": len(lines), "between_batches": at_rest}


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes its name when it is complete."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        yield file
    new.replace(path)
