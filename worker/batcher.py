"""Which waiting samples run together, and when: the worker's pure batching core.

Samples group by model and length bucket. A group's batch closes when the limit is full, when min_batch are there, when the window that
began with its FIRST arrival is over (looking again never restarts it), when waiting cannot pay (see window), or when a member's deadline
comes near. Of several groups that are due, the one whose head has the highest priority and then the earliest arrival goes first.

Models never mix. Shorter samples of the same model may fill up a batch of longer ones, when that costs less than a batch of their own and
makes nobody late (see Group.joins); longer ones never join shorter ones.

A request of many rows is one item whose rows count one by one: it fills batches as room allows, and several batches if it is large.
Limits may change at any time and hold from the next batch on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpupool.spec import BatchingSpec
from gpupool.wire import MAX_PRIORITY

from .account import Account
from .batch import Batch, CloseReason, Item, Share
from .ceiling import Ceilings, GroupKey
from .group import NEVER, Group, order

#: How much longer an urgent row may run for the sake of others in its batch.
URGENT_STRETCH: Final = 1.5
#: Groups that are described one by one, those with the most batches: a report has to fit into a message.
_DESCRIBED: Final = 64
#: Weight of the newest batch in the time per sample.
_NEWEST: Final = 1 / 8
_ROUNDING: Final = 1e-6  # 0.29 x 100 is 28.999… in floats, and means 29


class Batcher:
    """All that waits in one worker.

    Args:
        policies: batching settings of each model, by its number. A live list: `configure` changes it in place.
        ceilings: what the device's memory has allowed so far.
    """

    def __init__(self, policies: list[BatchingSpec], ceilings: Ceilings) -> None:
        self.batch_share = 1.0  # of each model's max_batch
        self.window_share = 1.0
        self._policies = policies
        self._ceilings = ceilings
        self._groups: dict[GroupKey, Group] = {}
        self._alone: list[Item] = []
        self._sequence = 0
        self._accounts: dict[int, Account] = {}  # by model; unlike groups they are never forgotten
        self._ran = 0
        self._recent_rows = self._recent_s = 0.0

    @property
    def rows(self) -> int:
        """Samples that wait."""
        return sum([g.rows for g in self._groups.values()]) + sum([i.rows - i.taken for i in self._alone])

    @property
    def service_s(self) -> float:
        """Time per sample of late, 0 until known: of batches by their fit where it is good, so that one batch's luck does not show."""
        return self._recent_s / self._recent_rows if self._recent_rows else 0.0

    def limit(self, key: GroupKey) -> int:
        """Return the largest batch of a group now: configured, tuned, steered and learned limits together."""
        group = self._groups.get(key)
        most = self._policies[key[0]].max_batch
        if group is not None and group.tuning is not None:
            most = group.tuning.limit
        limit = int(most * self.batch_share + _ROUNDING)
        ceiling = self._ceilings.limit(key)
        return max(1, limit if ceiling is None else min(limit, ceiling))

    def lowest_limit(self) -> int:
        """Return the smallest batch limit in force among all models and buckets."""
        most = min([p.max_batch for p in self._policies])
        tuned = min([g.tuning.limit for g in self._groups.values() if g.tuning is not None], default=most)
        limit = int(min(most, tuned) * self.batch_share + _ROUNDING)
        ceiling = self._ceilings.lowest()
        return max(1, limit if ceiling is None else min(limit, ceiling))

    def longest_window(self) -> float:
        """Return the longest configured window, times the share in force, in seconds. An adaptive model waits less, see window."""
        return max([p.window_ms for p in self._policies]) / 1000 * self.window_share

    def configure(self, policies: Sequence[BatchingSpec]) -> None:
        """Put new settings into force. What waits keeps its bucket; a bucket that is no more is forgotten when it is empty."""
        self._policies[:] = policies
        for key, group in list(self._groups.items()):
            policy = self._policies[key[0]]
            if group.queue or not key[1] or key[1] in policy.length_buckets:
                if policy != group.policy:
                    group.configure(policy)
            else:
                del self._groups[key]

    def add(self, item: Item, now: float) -> None:
        """Queue an item: behind all of its priority, before all of lower ones."""
        item.arrived = now
        self._sequence += 1
        item.order = (-item.priority, self._sequence)
        if item.alone:
            insort(self._alone, item, key=order)
            return
        group = self._groups.get(item.key)
        if group is None:
            group = self._groups[item.key] = Group(item.key, self._policies[item.key[0]])
        group.add(item, now)

    def take(self, now: float) -> Batch | None:
        """Return the batch to run now, None when nothing is due. What is past its deadline is left for `expire`."""
        best: Group | None = None
        best_reason = CloseReason.FULL
        for group in self._groups.values():
            if group.queue and (best is None or group.queue[0].order < best.queue[0].order):
                closes_at, reason = group.closing(self.limit(group.key), self.window_share)
                # One that holds nothing but what is past its deadline must not stand before others that are due.
                if closes_at <= now and any(item.deadline > now for item in group.queue):
                    best, best_reason = group, reason
        suspect = next((i for i in self._alone if i.deadline > now), None)
        if suspect is not None and (best is None or suspect.order < best.queue[0].order):
            return self._take_alone(suspect)
        return None if best is None else self._cut(best, best_reason, now)

    def next_deadline(self) -> float | None:
        """Return the earliest instant at which `take` or `expire` has something to do; None when nothing waits."""
        instants = [
            min(g.closing(self.limit(g.key), self.window_share)[0], g.deadline) for g in self._groups.values() if g.queue
        ]
        instants += [i.arrived for i in self._alone[:1]]
        return min(instants, default=None)

    def next_expiry(self) -> float | None:
        """Return the earliest deadline of all that waits."""
        instants = [g.deadline for g in self._groups.values() if g.queue]
        instants += [i.deadline for i in self._alone]
        return min(instants, default=None)

    def cancel(self, ticket: int) -> list[Item]:
        """Remove a request's items that wait, and return them; rows already taken cannot be had back."""
        return self._remove(lambda item: item.ticket == ticket)

    def expire(self, now: float) -> list[Item]:
        """Remove and return what is past its deadline: it is never started."""
        expiry = self.next_expiry()
        return [] if expiry is None or expiry > now else self._remove(lambda item: item.deadline <= now)

    def untouched(self) -> list[Item]:
        """Remove and return everything of which no row has run: what has begun is to be finished."""
        begun = {i.ticket for g in self._groups.values() for i in g.queue if i.taken} | {
            i.ticket for i in self._alone if i.taken
        }
        return self._remove(lambda item: item.ticket not in begun)

    def clear(self) -> list[Item]:
        """Remove and return everything."""
        return self._remove(lambda _: True)

    def ran(self, batch: Batch, seconds: float | None, now: float) -> None:
        """Note that a batch has ended, and learn from it: it took so long, or None when it did not go well."""
        for waiting in self._groups.values():
            waiting.freed(now)
        group = self._groups.get(batch.key)
        if group is None or seconds is None:
            return
        fit = group.fit
        fit.add(batch.rows, seconds)
        if group.tuning is not None:
            group.tuning.ran(batch.rows, [now - share.item.arrived for share in batch.shares], self.limit(batch.key), fit)
        self._ran += 1
        # The first batch pays for what is made at first use; the second replaces it.
        weight = 1.0 if self._ran <= 2 else max(_NEWEST, 1 / (self._ran - 1))
        self._recent_rows += (batch.rows - self._recent_rows) * weight
        self._recent_s += ((fit.predict(batch.rows) if fit.good else seconds) - self._recent_s) * weight

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Tell of batches and limits, with models by name: `closed` and `sizes` only grow, see Account.

        `groups` names at most those 64 that ran most.
        """
        closed: dict[str, int] = {}
        for account in self._accounts.values():
            for reason, count in account.closed.items():
                closed[str(reason)] = closed.get(str(reason), 0) + count
        return {
            "closed": closed,
            "sizes": {names[model]: {"counts": list(a.sizes), "samples": a.rows} for model, a in self._accounts.items()},
            "groups": [
                {"model": names[g.key[0]], "bucket": g.key[1], **g.describe(self.limit(g.key), self.window_share)}
                for g in sorted(self._groups.values(), key=lambda g: -g.account.batches)[:_DESCRIBED]
            ],
        }

    def _cut(self, group: Group, reason: CloseReason, now: float) -> Batch | None:
        limit = self.limit(group.key)
        room = self._room(group, limit)
        shares = group.cut(room, now)
        if not shares:
            return None
        rows = sum([s.stop - s.start for s in shares])
        borrowed: list[Share] = []
        if rows < room == limit and len(self._groups) > 1:
            borrowed = self._borrow(group, shares, room - rows, now)
        lent = sum([s.stop - s.start for s in borrowed])
        self._note(group, reason, rows + lent, limit, lent)
        group.feedback.ran(rows, limit)
        return Batch(group.key, shares + borrowed, rows + lent, reason)

    def _note(self, group: Group, reason: CloseReason, rows: int, limit: int, lent: int) -> None:
        group.account.note(reason, rows, limit, lent)
        self._accounts.setdefault(group.key[0], Account()).note(reason, rows, limit, lent)

    def _room(self, group: Group, limit: int) -> int:
        """Return how many rows the next batch may have: the limit, and where what is urgent leads it, not much besides that.

        Who is let past a flood shall not pay for filling its batch up: that takes at most URGENT_STRETCH times what the urgent rows would
        alone. Where the run time hardly depends on the rows this changes nothing.
        """
        fit = group.fit
        if group.queue[0].priority <= MAX_PRIORITY or not fit.good or not fit.per_sample_s:
            return limit
        urgent = sum(i.rows - i.taken for i in group.queue if i.priority > MAX_PRIORITY)
        return min(limit, max(urgent, int((URGENT_STRETCH * fit.predict(urgent) - fit.fixed_s) / fit.per_sample_s)))

    def _borrow(self, host: Group, shares: Sequence[Share], room: int, now: float) -> list[Share]:
        """Fill a batch of longer samples up with whole queues of shorter ones, the least shorter first."""
        model, bound = host.key
        deadline = min(share.item.deadline for share in shares)
        rows = sum([s.stop - s.start for s in shares])
        borrowed: list[Share] = []
        shorter = [g for k, g in self._groups.items() if g.queue and k[0] == model and 0 < k[1] < (bound or NEVER)]
        for group in sorted(shorter, key=lambda g: -g.key[1]):
            if group.rows <= room and group.joins(host, rows, deadline, now):
                deadline = min(deadline, group.deadline)
                taken = group.cut(room, now)
                count = sum([s.stop - s.start for s in taken])
                borrowed += taken
                rows += count
                room -= count
        return borrowed

    def _take_alone(self, item: Item) -> Batch:
        limit = self.limit(item.key)
        start = item.taken
        item.taken = stop = min(item.rows, start + limit)
        if stop == item.rows:
            self._alone.remove(item)
        group = self._groups.get(item.key)
        if group is None:
            group = self._groups[item.key] = Group(item.key, self._policies[item.key[0]])
        self._note(group, CloseReason.ALONE, stop - start, limit, 0)
        return Batch(item.key, [Share(item, start, stop)], stop - start, CloseReason.ALONE)

    def _remove(self, wanted: Callable[[Item], bool]) -> list[Item]:
        removed = [i for i in self._alone if wanted(i)]
        if removed:
            self._alone = [i for i in self._alone if not wanted(i)]
        for group in self._groups.values():
            gone = [i for i in group.queue if wanted(i)]
            if gone:
                removed += gone
                group.queue = [i for i in group.queue if not wanted(i)]
                group.count()
        return removed
