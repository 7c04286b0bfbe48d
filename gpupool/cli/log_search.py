"""Finds the few lines of a large log that hold one of some texts: whole blocks are searched before any line is looked at."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

#: A line that is longer than that is none of ours; it is passed over.
_MAX_LINE_BYTES: Final = 1 << 20


class Search:
    """One pass over a log. Afterwards `first` and `last` are the log's first and last records that have a time."""

    def __init__(self, needles: Sequence[bytes]) -> None:
        self._needles = needles
        self.first: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.size_bytes = 0

    def records(self, blocks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        """Yield the records of the lines that hold one of the texts, in order; at most one block and one line are held."""
        rest = b""
        for block in blocks:
            self.size_bytes += len(block)
            end = block.rfind(b"\n") + 1
            if not end:
                rest = rest + block if len(rest) <= _MAX_LINE_BYTES else b""
                continue
            whole, rest = rest + block[:end], block[end:]
            yield from self._of(whole)
        if rest:
            yield from self._of(rest)

    def _of(self, lines: bytes) -> Iterator[dict[str, Any]]:
        if self.first is None:
            self.first = next((record for line in lines[:65536].split(b"\n")[:20] if (record := _timed(line))), None)
        starts = set()
        for needle in self._needles:
            at = lines.find(needle)
            while at >= 0:
                starts.add(lines.rfind(b"\n", 0, at) + 1)
                end = lines.find(b"\n", at)
                at = lines.find(needle, end) if end >= 0 else -1
        for start in sorted(starts):
            end = lines.find(b"\n", start)
            if (record := parsed(lines[start : end if end >= 0 else len(lines)])) is not None:
                yield record
        newest = lines[-65536:].split(b"\n")[-20:]
        self.last = next((record for line in reversed(newest) if (record := _timed(line))), self.last)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Read one line; what stands before its JSON (a time, a host's name, of whoever carried it) is left."""
    at = line.find(b"{")
    try:
        record = json.loads(line[at:]) if at >= 0 else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _timed(line: bytes) -> dict[str, Any] | None:
    record = parsed(line)
    return record if record is not None and isinstance(record.get("time"), int | float) else None
