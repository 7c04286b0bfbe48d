"""How large a batch the device's memory holds, per model and bucket: as planned from measurements, and as it has turned out.

A planned ceiling is approached from below: from a share of it, by a tenth of it after STEP_AFTER full batches in a row that went well. A
batch that did not fit lowers the limit at once: to half, or to a larger size that is known to fit; from then on the plan is not trusted. A
size that used to fit is approached like a planned one, as far as a tenth below it. Above that, and where nothing is known, the limit rises by one sample after PATIENCE full batches, because memory may have been short
for a passing reason; a raise that fails doubles the patience, so the search costs less and less.

Ceilings end with their process. A new one measures anew, and what it starts with after a recycle is better than what the old one ended
with; where no plan is possible the same knowledge costs one batch that is run again in halves.

Two threads write, one at a time: the work loop after a batch, the link at a reload. Who reads needs no lock: whole dicts are exchanged, and
never grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

GroupKey = tuple[int, int]  # model, and the bucket by its upper bound: 0 means unbounded

STEP_AFTER: Final = 8
PATIENCE: Final = 64
_STEP_SHARE: Final = 10
_MAX_PATIENCE: Final = 4096


class _Ceiling:
    __slots__ = ("clean", "good", "limit", "patience", "planned", "trusted")

    def __init__(self, limit: int, *, planned: bool = False) -> None:
        self.limit = limit
        self.planned = planned
        self.trusted = limit  # up to here a plan vouches, or what used to fit
        self.good = 0  # largest size that went well since the last surprise
        self.clean = 0
        self.patience = PATIENCE

    def rise(self) -> int:
        """How many samples the next step is."""
        return min(max(1, self.trusted // _STEP_SHARE), self.trusted - self.limit) if self.limit < self.trusted else 1

    @property
    def enough(self) -> int:
        """Full batches in a row that the next step needs."""
        return STEP_AFTER if self.limit < self.trusted else self.patience


class Ceilings:
    """The ceilings of one worker. Sizes in samples.

    Args:
        writing: entered by whoever writes, also twice: a threading.RLock where there are threads.
    """

    def __init__(self, writing: AbstractContextManager[object] | None = None) -> None:
        self._ceilings: dict[GroupKey, _Ceiling] = {}
        self.writing = writing or nullcontext()

    def limit(self, key: GroupKey) -> int | None:
        """Return the ceiling; None where there is no plan and memory was never short."""
        ceiling = self._ceilings.get(key)
        return None if ceiling is None else ceiling.limit

    def limits(self) -> dict[GroupKey, int]:
        """Return all ceilings."""
        return {key: ceiling.limit for key, ceiling in self._ceilings.items()}

    def lowest(self) -> int | None:
        """Return the smallest ceiling of all models, where a model's is that of its roomiest bucket.

        Others plan by it how much work a worker should hold: were it that of the longest bucket, short samples would never fill a batch.
        """
        if not self._ceilings:
            return None
        by_model: dict[int, int] = {}
        for (model, _), limit in self.limits().items():
            by_model[model] = max(limit, by_model.get(model, 0))
        return min(by_model.values(), default=None)

    def plan(self, ceilings: Mapping[GroupKey, int], start_fraction: float) -> None:
        """Put planned ceilings into force, at the start or because the budget has changed.

        A limit above a new plan is cut to it at once; one below it goes to `start_fraction` of it if that is more, and rises from there.
        Ceilings without a plan are probed afresh.
        """
        with self.writing:
            renewed: dict[GroupKey, _Ceiling] = {}
            for key, old in self._ceilings.items():
                if not old.planned:
                    old.patience, old.clean = PATIENCE, 0
                    renewed[key] = old
            for key, planned in ceilings.items():
                start = max(1, int(planned * start_fraction + 1e-6))  # 0.29 x 100 is 28.999… in floats, and means 29
                ceiling = _Ceiling(start, planned=True)
                ceiling.trusted = planned
                if before := self._ceilings.get(key):
                    ceiling.limit = min(planned, max(start, before.limit))
                    ceiling.good = min(before.good, planned)
                renewed[key] = ceiling
            self._ceilings = renewed

    def failed(self, key: GroupKey, rows: int) -> int:
        """Note that a batch of `rows` did not fit although each of its samples does; return the new ceiling."""
        with self.writing:
            ceiling = self._ceilings.get(key) or _Ceiling(rows)
            nearly = 0
            if (
                rows <= ceiling.good
            ):  # what used to fit does not: start the search anew, and soon be back near there if it passes
                ceiling.good, nearly = 0, rows - max(1, rows // _STEP_SHARE)
            elif ceiling.good:
                ceiling.patience = min(2 * ceiling.patience, _MAX_PATIENCE)
            ceiling.limit = min(ceiling.limit, max(ceiling.good, (rows + 1) // 2))
            ceiling.trusted = max(ceiling.limit, nearly)
            ceiling.clean = 0
            if key not in self._ceilings:
                self._ceilings = {**self._ceilings, key: ceiling}
            return ceiling.limit

    def succeeded(self, key: GroupKey, rows: int, *, most: int) -> bool:
        """Note a batch that went well; return whether the ceiling rose.

        At `most` (the configured batch) one without a plan is forgotten, and a planned one rises no further.
        """
        with self.writing:
            ceiling = self._ceilings.get(key)
            if ceiling is None:
                return False
            ceiling.good = max(ceiling.good, rows)
            if rows < min(ceiling.limit, most):
                return False
            if ceiling.planned and ceiling.limit >= most:
                return False
            ceiling.clean += 1
            if ceiling.clean < ceiling.enough:
                return False
            ceiling.clean = 0
            ceiling.limit += ceiling.rise()
            if ceiling.limit > most and not ceiling.planned:
                self._ceilings = {k: c for k, c in self._ceilings.items() if k != key}
            return True
