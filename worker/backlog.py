"""The batcher between two threads: the link puts in, the work loop takes out, one lock guards both and the board's queue word."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpupool.spec import BatchingSpec

from .account import Turnaround
from .batch import Batch, CloseReason, Item
from .batcher import Batcher
from .drill import hang
from .record import Record


class Backlog:
    """All that waits, with waking up.

    Args:
        batcher: the deciding core.
        record: where the queue word and the limits are published.
    """

    def __init__(self, batcher: Batcher, record: Record, clock: Callable[[], float] = time.monotonic) -> None:
        #: Called when items have expired while the work loop looked; the link then fetches them.
        self.tell_expired: Callable[[], None] = lambda: None
        self._batcher = batcher
        self._record = record
        self._clock = clock
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._rests = threading.Condition(lock)
        self._at_rest = False  # the work loop is in `next_batch`, and has cut none yet
        self._held = 0  # threads for which it is to cut none
        self._expired: list[Item] = []
        self._turnaround = Turnaround()
        self._running = 0
        self._undecoded = 0
        self._closed = False
        self._errand: Callable[[], None] | None = None  # what the work loop is to do before it cuts another batch
        self._drilled_s = 0.0  # a drill was ordered: the work loop hangs, with this deadline

    def add(self, items: Sequence[Item], *, undecoded: int) -> None:
        """Queue prepared items. `undecoded` samples are still being prepared; they count as queued on the board."""
        with self._changed:
            now = self._clock()
            for item in items:
                self._batcher.add(item, now)
            self._undecoded = undecoded
            self._publish()
            if items or self._closed:
                self._changed.notify()

    def cancel(self, ticket: int) -> list[Item]:
        """Take a request's waiting items out."""
        with self._changed:
            items = self._batcher.cancel(ticket)
            self._publish()
        return items

    def expire(self) -> list[Item]:
        """Take out what is past its deadline."""
        with self._changed:
            items, self._expired = self._expired + self._batcher.expire(self._clock()), []
            if items:
                self._publish()
        return items

    def next_expiry(self) -> float | None:
        """Return when the next item expires."""
        with self._changed:
            return self._batcher.next_expiry()

    def clear(self) -> None:
        """Drop everything that waits: it came from a router that is no more."""
        with self._changed:
            self._batcher.clear()
            self._expired.clear()
            self._undecoded = 0
            self._publish()

    def close(self, *, undecoded: int = 0) -> list[Item]:
        """Give back what was never begun; once the rest is done, with `undecoded` samples that are yet to come, the work loop ends."""
        with self._changed:
            self._closed = True
            self._undecoded = undecoded
            items = self._batcher.untouched()
            self._publish()
            self._changed.notify()
        return items

    def next_batch(self) -> tuple[Batch, list[Any]] | None:
        """Wait for a batch and return it with its samples; None when closed and empty. Limits are read anew each time."""
        with self._changed:
            self._at_rest = True
            self._rests.notify_all()
            while True:
                if self._errand is not None and not self._held:
                    errand, self._errand = self._errand, None
                    self._changed.release()  # the link and the beat need it, and need not wait
                    try:
                        errand()
                    finally:
                        self._changed.acquire()
                self._read_shares()
                now = self._clock()
                if expired := self._batcher.expire(now):
                    self._expired += expired
                    self.tell_expired()
                batch = None if self._held else self._batcher.take(now)
                if self._drilled_s and (batch is not None or not self._batcher.rows):
                    break
                if batch is not None:
                    self._at_rest = False
                    self._running = batch.rows
                    self._publish()
                    # Under the lock: the link may let go of a request's rows as soon as it ends.
                    return batch, [s for share in batch.shares for s in share.item.owner.samples(share.start, share.stop)]
                if self._closed and not self._batcher.rows and not self._undecoded:
                    return None
                deadline = self._batcher.next_expiry() if self._held else self._batcher.next_deadline()
                self._changed.wait(None if deadline is None else max(0.0, deadline - now))
        # Without the lock: a hung model leaves the link and the beat alone.
        return hang(self._record, batch.tickets if batch is not None else (), self._drilled_s)

    @contextmanager
    def between_batches(self, timeout_s: float) -> Iterator[bool]:
        """Have no batch begin inside; True once none runs, False when one still does after `timeout_s` seconds.

        What waits meanwhile is not cut: it can be cancelled, and expires in time.
        """
        try:
            with self._changed:
                self._held += 1
                at_rest = self._rests.wait_for(lambda: self._at_rest, timeout_s)
            yield at_rest
        finally:
            with self._changed:
                self._held -= 1
                self._changed.notify()

    def run_between(self, errand: Callable[[], None]) -> None:
        """Have the work loop call something between two batches: at once when it waits. It must raise nothing."""
        with self._changed:
            self._errand = errand
            self._changed.notify()

    def ran(self, batch: Batch, started_at: float, seconds: float, *, clean: bool) -> None:
        """Note the end of a batch, for the forecasts if it went well: when it began and how long it took, in monotonic seconds."""
        with self._changed:
            self._running = 0
            self._turnaround.ran(started_at, seconds, _complete_at(batch))
            self._batcher.ran(batch, seconds if clean else None, self._clock())
            self._record.service(self._batcher.service_s, self._batcher.full_row_s)
            self._publish_limits()
            self._publish()

    def report(self, names: Sequence[str]) -> dict[str, Any]:
        """Tell of batches, for people and metrics; `names` of the models by number."""
        with self._changed:
            return {**self._batcher.describe(names), "between_full": self._turnaround.describe()}

    def drill(self, timeout_s: float) -> None:
        """Let the work loop hang with the next batch, at once when nothing waits."""
        with self._changed:
            self._drilled_s = timeout_s
            self._changed.notify()

    def configure(self, policies: Sequence[BatchingSpec]) -> None:
        """Put new batching settings into force from the next batch on."""
        with self._changed:
            self._batcher.configure(policies)
            self._publish_limits()
            self._changed.notify()

    def refresh(self) -> None:
        """Read the supervisor's limits although no batch is due, so that they hold and the board shows it."""
        with self._changed:
            if self._read_shares():
                self._changed.notify()
            self._publish_limits()

    @property
    def quiet(self) -> bool:
        """Whether nothing runs and nothing waits, here or to be prepared."""
        with self._changed:
            return self._at_rest and not self._batcher.rows and not self._undecoded

    @property
    def rows(self) -> int:
        """Samples that wait in the batcher."""
        with self._changed:
            return self._batcher.rows

    @property
    def lowest_limit(self) -> int:
        """The smallest batch limit in force."""
        with self._changed:
            return self._batcher.lowest_limit()

    def _read_shares(self) -> bool:
        """Put the shares that the supervisor wants into force; return whether they are new."""
        batcher = self._batcher
        batch_share, window_share = self._record.set_shares()
        if self._closed:
            window_share = 0.0  # nobody comes any more whom to wait for
        if batch_share == batcher.batch_share and window_share == batcher.window_share:
            return False
        batcher.batch_share, batcher.window_share = batch_share, window_share
        self._publish_limits()
        return True

    def _publish_limits(self) -> None:
        self._record.limits(self._batcher.lowest_limit(), self._batcher.longest_window())

    def _publish(self) -> None:
        self._record.queue(self._running, self._batcher.rows + self._undecoded)


def _complete_at(batch: Batch) -> float | None:
    """When the last row of a full batch had come; None for one that closed for another reason."""
    return max([share.item.arrived for share in batch.shares]) if batch.reason is CloseReason.FULL else None
