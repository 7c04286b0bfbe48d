"""What waits of one model and length bucket, when its batch closes, and what was learned from those that ran."""

from __future__ import annotations

from bisect import insort
from typing import Any, Final

from gpupool.spec import BatchingSpec

from .account import Account
from .batch import CloseReason, Item, Share
from .ceiling import GroupKey
from .fit import BatchFit
from .tuning import Tuning
from .window import ArrivalGaps, Feedback, longest_s, worthwhile_wait

#: A batch starts this much earlier than a member's deadline would demand: waking up and answering take time too.
DEADLINE_MARGIN_S: Final = 0.002
NEVER: Final = float("inf")
#: A close that was due when it became possible.
AT_ONCE: Final = -NEVER
_ROUNDING: Final = 1e-6  # 0.29 x 100 is 28.999… in floats, and means 29


class Group:
    """One model and bucket. The queue is in the order of `Item.order`."""

    __slots__ = (
        "account",
        "allowed",
        "bucketless",
        "deadline",
        "feedback",
        "first",
        "fit",
        "freed_at",
        "gaps",
        "key",
        "policy",
        "queue",
        "rows",
        "tuning",
    )

    def __init__(self, key: GroupKey, policy: BatchingSpec) -> None:
        self.key = key
        self.queue: list[Item] = []
        self.rows = 0
        self.allowed = 1  # limit by the settings, the tuner and the share in force; what memory allows besides may be less
        self.first = NEVER  # earliest arrival of those that wait
        self.deadline = NEVER  # earliest of theirs
        self.freed_at = 0.0  # when the device last became free while somebody waited here
        self.fit = BatchFit()
        self.feedback = Feedback()
        self.account = Account()
        self.configure(policy)

    def configure(self, policy: BatchingSpec) -> None:
        """Put settings into force. Forecasts of arrivals and the search for the limit start anew; what batches cost stays known."""
        self.policy = policy
        #: The settings do not name this bucket any more: it goes when what waits has left.
        self.bucketless = self.key[1] != 0 and self.key[1] not in policy.length_buckets
        self.gaps = ArrivalGaps(policy)
        self.tuning = Tuning(policy) if policy.p99_ms else None

    def allow(self, batch_share: float) -> None:
        """Work out `allowed` after what it follows from has changed."""
        most = self.policy.max_batch if self.tuning is None else self.tuning.limit
        self.allowed = share_of(most, batch_share)

    def add(self, item: Item, now: float) -> None:
        """Queue an item by its order."""
        queue = self.queue
        if not queue:
            queue.append(item)
            self.first, self.deadline = now, item.deadline
        else:
            if queue[-1].order < item.order:
                queue.append(item)
            else:
                insort(queue, item, key=order)
            if item.deadline < self.deadline:  # noqa: PLR1730  # once for each request, and a call costs three times as much
                self.deadline = item.deadline
        self.rows += item.rows
        self.gaps.add(now, self.rows)

    def freed(self, now: float) -> None:
        """Note that the device has become free."""
        if self.rows:
            self.freed_at = now
            self.gaps.freed(now, self.rows)

    def count(self) -> None:
        """Work out what follows from the queue, after items have left it."""
        if queue := self.queue:
            self.rows = sum([i.rows - i.taken for i in queue])
            self.first = min([i.arrived for i in queue])
            self.deadline = min([i.deadline for i in queue])
        else:
            self.rows, self.first, self.deadline = 0, NEVER, NEVER

    def closing(self, limit: int, window_share: float) -> tuple[float, CloseReason]:
        """Say when the batch closes, if nobody else comes, and why."""
        rows, policy = self.rows, self.policy
        if rows >= limit:
            return AT_ONCE, CloseReason.FULL
        enough = rows >= policy.min_batch
        since = self.first
        if policy.adaptive:
            wait, gap = longest_s(rows, policy, self.feedback.share) * window_share, self.gaps.after(rows)
            if self.fit.good and gap.known:
                wait = worthwhile_wait(rows, wait, self.fit, gap)
                since = max(since, self.freed_at)
            else:
                wait = 0.0 if enough else wait * self.feedback.share
            if not wait:
                return (AT_ONCE, CloseReason.MIN) if enough else (self.first, CloseReason.IDLE)
        elif enough:
            return AT_ONCE, CloseReason.MIN
        else:
            wait = policy.window_ms / 1000 * window_share
        closes_at = since + wait
        if self.deadline != NEVER:
            urgent_at = self.deadline - self.needs_s(rows)
            if urgent_at < closes_at:
                return urgent_at, CloseReason.DEADLINE
        return closes_at, CloseReason.WINDOW

    def needs_s(self, rows: int) -> float:
        """Return how long before a deadline a batch must start: its run, what that is usually off by, and a margin."""
        expected = self.fit.predict(rows) if self.fit.known else self.fit.mean_s
        return expected + self.fit.residual_s + DEADLINE_MARGIN_S

    def cut(self, room: int, now: float) -> list[Share]:
        """Take up to `room` rows that are not past their deadline, in order."""
        shares: list[Share] = []
        left: list[Item] = []
        for at, item in enumerate(self.queue):
            if not room:
                left += self.queue[at:]
                break
            if item.deadline <= now:
                left.append(item)
                continue
            start, stop = item.taken, item.rows
            if stop - start > room:
                stop = start + room
                left.append(item)
            item.taken = stop
            room -= stop - start
            shares.append(Share(item, start, stop))
        self.queue = left
        self.count()
        return shares

    def joins(self, host: Group, rows: int, host_deadline: float, now: float) -> bool:
        """Whether all that waits here had better run in the host's batch of so many rows, which is of longer samples.

        That is where the host's batch grows by less than a batch of our own would take, and still ends before anybody's deadline.
        Both by fits that are good; one that has not yet told rows from batches is not asked.
        """
        if not (self.fit.good and host.fit.good and host.fit.per_sample_s):
            return False
        if self.rows * host.fit.per_sample_s >= self.fit.predict(self.rows):
            return False
        return now + host.needs_s(rows + self.rows) <= min(host_deadline, self.deadline)

    def describe(self, limit: int, window_share: float) -> dict[str, Any]:
        """Tell people what is known and in force: plain values, times in milliseconds."""
        fit, policy = self.fit, self.policy
        longest_ms = 1000 * longest_s(policy.min_batch, policy, self.feedback.share) if policy.adaptive else policy.window_ms
        return {
            "limit": limit,
            "window_ms": _ms(longest_ms * window_share / 1000),
            "idle_window_ms": _ms(policy.idle_window_ms * window_share / 1000) if policy.adaptive else None,
            "waiting": self.rows,
            "fit": {
                "fixed_ms": _ms(fit.fixed_s),
                "per_sample_ms": _ms(fit.per_sample_s),
                "residual_ms": _ms(fit.residual_s),
                "batches": fit.batches,
                "good": fit.good,
            },
            "tuning": None if self.tuning is None else self.tuning.describe(),
            **self.account.describe(),
        }


def share_of(most: int, batch_share: float) -> int:
    """Return how many samples a share of a limit is; at least one."""
    return max(1, int(most * batch_share + _ROUNDING))


def order(item: Item) -> tuple[int, int]:
    """What a queue is sorted by."""
    return item.order


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)
