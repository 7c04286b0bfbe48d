"""How large a batch the device's memory has turned out to hold, per model and bucket.

A batch that did not fit lowers the ceiling at once: to half, or to a larger size that is known to fit. It rises again by one sample
after PATIENCE full batches at the ceiling went well, because memory may have been short for a passing reason; a raise that fails
doubles the patience, so the search costs less and less.
"""

from __future__ import annotations

from typing import Final

GroupKey = tuple[int, int]  # model, and the bucket by its upper bound: 0 means unbounded

PATIENCE: Final = 64
_MAX_PATIENCE: Final = 4096


class _Ceiling:
    __slots__ = ("clean", "good", "limit", "patience")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.good = 0  # largest size that went well since the last surprise
        self.clean = 0
        self.patience = PATIENCE


class Ceilings:
    """The ceilings of one worker. Sizes in samples."""

    def __init__(self) -> None:
        self._ceilings: dict[GroupKey, _Ceiling] = {}

    def limit(self, key: GroupKey) -> int | None:
        """Return the ceiling; None where memory was never short."""
        ceiling = self._ceilings.get(key)
        return None if ceiling is None else ceiling.limit

    def lowest(self) -> int | None:
        """Return the smallest of all ceilings."""
        return min((c.limit for c in self._ceilings.values()), default=None)

    def failed(self, key: GroupKey, rows: int) -> int:
        """Note that a batch of `rows` did not fit although each of its samples does; return the new ceiling."""
        ceiling = self._ceilings.setdefault(key, _Ceiling(rows))
        if rows <= ceiling.good:  # what used to fit does not: start the search anew
            ceiling.good = 0
        elif ceiling.good:
            ceiling.patience = min(2 * ceiling.patience, _MAX_PATIENCE)
        ceiling.limit = min(ceiling.limit, max(ceiling.good, (rows + 1) // 2))
        ceiling.clean = 0
        return ceiling.limit

    def succeeded(self, key: GroupKey, rows: int, *, most: int) -> bool:
        """Note a batch that went well; return whether the ceiling rose. At `most` (the configured batch) it is forgotten."""
        ceiling = self._ceilings.get(key)
        if ceiling is None:
            return False
        ceiling.good = max(ceiling.good, rows)
        if rows < ceiling.limit:
            return False
        ceiling.clean += 1
        if ceiling.clean < ceiling.patience:
            return False
        ceiling.clean = 0
        ceiling.limit += 1
        if ceiling.limit > most:
            del self._ceilings[key]
        return True
