"""How long a newcomer would wait at the least, judged by the batches that the present workers have run.

It supposes full batches, and takes for a row's time what the worker says that one would take in them by its fit, whatever size ran of late.
Where a worker has no good fit, they are supposed to last as long as its batches of late. While those are small this errs to the low side,
which is the right one: under load they fill, and the forecast becomes exact within a few of them.

A limit falls at once, and what is known of batches follows only as they end, so no new limit is ever divided by an old limit's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpupool.link import Result

from .backlog import Backlog
from .tenants import Tenant
from .workers import Worker

#: Weight of a new batch in the smoothed duration of a worker's batches.
_SMOOTHING: Final = 0.2


class Forecast:
    """The speed of the workers that may get work: rows per second at the most, 0 until every one of them is known."""

    def __init__(self) -> None:
        self.rows_per_s = 0.0

    def learn(self, worker: Worker, result: Result) -> None:
        """Take in a batch, of which any one result tells."""
        if result.started and result.batch_size > 0 and result.forward_s > 0.0:
            weight = _SMOOTHING if worker.batch_s else 1.0
            worker.batch_s += weight * (result.forward_s - worker.batch_s)
            worker.batch_rows += weight * (result.batch_size - worker.batch_rows)

    def update(self, workers: Sequence[Worker]) -> None:
        """Take in who may get work now, and how fast they are."""
        speeds = [_rows_per_s(w) for w in workers]
        self.rows_per_s = sum(speeds) if all(speeds) else 0.0

    def wait_s(self, backlog: Backlog, workers: Sequence[Worker], tenant: Tenant, priority: int) -> float:
        """Return how long a newcomer of this tenant and priority would wait; 0 when unknown."""
        if not self.rows_per_s:
            return 0.0
        return (backlog.rows_ahead(tenant, priority) + sum(w.rows for w in workers)) / self.rows_per_s


def _rows_per_s(worker: Worker) -> float:
    """How fast a worker is in full batches; 0 while unknown."""
    if worker.full_row_s:
        return 1.0 / worker.full_row_s
    return max(worker.batch_limit, worker.batch_rows) / worker.batch_s if worker.batch_s else 0.0
