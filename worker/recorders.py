"""The profilers that a profile records by: torch's where the process has torch, else Python's; each with its file and its sums.

torch.autograd.profiler and not torch.profiler, which is the same recorder and imports 800 modules more at its first start: 0.9 s in the work
loop and 77 MiB of a worker's budget (torch 2.13). The sums are made here: torch's own table takes 3.6 kB for each record, and ended a worker
with 200 MB of room.
"""

from __future__ import annotations

import cProfile
import gzip
import pstats
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

#: Lines of the table, and characters of a name in it.
LINES: Final = 20
_NAME_CHARS: Final = 120
#: torch writes the values of numbers among an operator's arguments, which may be a client's. Shapes may stay.
_VALUES: Final = re.compile(r'"Concrete Inputs": \[(?:"(?:[^"\\]|\\.)*"(?:, ?)?)*\]')

#: Whether cProfile records the thread that enables it and no other.
_THREADS_APART: bool = sys.version_info < (3, 12)

Operator = dict[str, Any]


class Recorder(Protocol):
    """One profiler: all but `write` is called on the work loop's thread."""

    kind: str
    #: Whether each call makes a record that takes memory.
    grows: bool

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
    grows = True

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
    """Python's own profiler, where there is no torch: functions of this thread.

    Raises:
        RuntimeError: from Python 3.12 on, where cProfile is the whole interpreter's: it would count other threads' functions as the batch's.
    """

    kind = "python"
    grows = False

    def __init__(self) -> None:
        if not _THREADS_APART:
            raise RuntimeError(
                "Python's profiler records all threads from Python 3.12 on; profile a worker that imports torch, or use 3.11"
            )
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


def _summed(events: Sequence[Any], *, on_card: bool) -> list[Operator]:
    """Sum up torch's events by name; a host operator's own time is without that of those within it. Kernels have rows of their own."""
    host: list[tuple[int, int, int, str]] = []  # thread, start, length below zero, name
    rows: dict[str, Operator] = {}
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
