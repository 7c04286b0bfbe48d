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

from .account import Account, Prediction
from .batch import Batch, CloseReason, Item, Share
from .ceiling import Ceilings, GroupKey
from .group import NEVER, Group, order, share_of
from .service import Service

#: How much longer an urgent row may run for the sake of others in its batch.
URGENT_STRETCH: Final = 1.5
#: Groups that are described one by one, those with the most batches: a report has to fit into a message.
_DESCRIBED: Final = 64


class Batcher:
    """All that waits in one worker.

    Args:
        policies: batching settings of each model, by its number. A live list: `configure` changes it in place.
        ceilings: what the device's memory has allowed so far.
    """

    def __init__(self, policies: list[BatchingSpec], ceilings: Ceilings) -> None:
        self.window_share = 1.0
        self._batch_share = 1.0
        self._policies = policies
        self._ceilings = ceilings
        self._groups: dict[GroupKey, Group] = {}
        self._alone: list[Item] = []
        self._sequence = 0
        self._rows = 0  # that wait, of all groups and alone
        self._expiry = NEVER  # nothing expires before; what it was taken from may have left since
        self._past: dict[int, Account] = {}  # by model, the batches of groups that are forgotten
        self._lowest = 0  # limit without memory's, 0: to be worked out
        self._service = Service()
        self._prediction = Prediction()

    @property
    def rows(self) -> int:
        """Samples that wait."""
        return self._rows

    @property
    def batch_share(self) -> float:
        """The share of each model's max_batch that is in force."""
        return self._batch_share

    @batch_share.setter
    def batch_share(self, share: float) -> None:
        if share != self._batch_share:
            self._batch_share = share
            self._lowest = 0
            for group in self._groups.values():
                group.allow(share)

    @property
    def service_s(self) -> float:
        """Time per sample of late; 0 until known."""
        return self._service.per_sample_s

    @property
    def full_row_s(self) -> float:
        """Time per sample, mixed as of late and all in full batches; 0 until the fits are good."""
        return self._service.full_row_s

    def limit(self, key: GroupKey) -> int:
        """Return the largest batch of a group now: configured, tuned, steered and learned limits together."""
        group = self._groups.get(key)
        return self._limit(
            key, share_of(self._policies[key[0]].max_batch, self._batch_share) if group is None else group.allowed
        )

    def lowest_limit(self) -> int:
        """Return the smallest batch limit in force among all models and buckets."""
        if not self._lowest:
            most = min([p.max_batch for p in self._policies])
            tuned = [g.tuning.limit for g in self._groups.values() if g.tuning is not None]
            self._lowest = share_of(min([most, *tuned]), self._batch_share)
        ceiling = self._ceilings.lowest()
        return self._lowest if ceiling is None else max(1, min(self._lowest, ceiling))

    def longest_window(self) -> float:
        """Return the longest configured window, times the share in force, in seconds. An adaptive model waits less, see window."""
        return max([p.window_ms for p in self._policies]) / 1000 * self.window_share

    def configure(self, policies: Sequence[BatchingSpec]) -> None:
        """Put new settings into force. What waits keeps its bucket; a bucket that is no more is forgotten when it is empty."""
        self._policies[:] = policies
        self._lowest = 0
        for group in list(self._groups.values()):
            policy = self._policies[group.key[0]]
            if policy != group.policy:
                group.configure(policy)
                group.allow(self._batch_share)
            self._forget_if_done(group)

    def add(self, item: Item, now: float) -> None:
        """Queue an item: behind all of its priority, before all of lower ones."""
        item.arrived = now
        self._sequence += 1
        item.order = (-item.priority, self._sequence)
        self._rows += item.rows
        if item.deadline < self._expiry:  # noqa: PLR1730  # once for each request, and a call costs three times as much
            self._expiry = item.deadline
        if item.alone:
            insort(self._alone, item, key=order)
        else:
            (self._groups.get(item.key) or self._make(item.key)).add(item, now)

    def take(self, now: float) -> Batch | None:
        """Return the batch to run now, None when nothing is due. What is past its deadline is left for `expire`."""
        best: Group | None = None
        best_limit, best_reason = 0, CloseReason.FULL
        for group in self._groups.values():
            if group.queue and (best is None or group.queue[0].order < best.queue[0].order):
                limit = self._limit(group.key, group.allowed)
                closes_at, reason = group.closing(limit, self.window_share)
                # One that holds nothing but what is past its deadline must not stand before others that are due.
                if closes_at <= now and (now < group.deadline or any(item.deadline > now for item in group.queue)):
                    best, best_limit, best_reason = group, limit, reason
        suspect = next((i for i in self._alone if i.deadline > now), None) if self._alone else None
        if suspect is not None and (best is None or suspect.order < best.queue[0].order):
            return self._take_alone(suspect)
        return None if best is None else self._cut(best, best_limit, best_reason, now)

    def next_deadline(self) -> float | None:
        """Return the earliest instant at which `take` or `expire` has something to do; None when nothing waits."""
        soonest = self._alone[0].arrived if self._alone else NEVER
        for group in self._groups.values():
            if group.queue:
                closes_at, _ = group.closing(self._limit(group.key, group.allowed), self.window_share)
                soonest = min(soonest, closes_at, group.deadline)
        return None if soonest == NEVER else soonest

    def next_expiry(self) -> float | None:
        """Return the earliest deadline of all that waits."""
        earliest = self._earliest()
        return None if earliest == NEVER else earliest

    def cancel(self, ticket: int) -> list[Item]:
        """Remove a request's items that wait, and return them; rows already taken cannot be had back."""
        return self._remove(lambda item: item.ticket == ticket)

    def expire(self, now: float) -> list[Item]:
        """Remove and return what is past its deadline: it is never started."""
        if now < self._expiry:
            return []
        expired = self._remove(lambda item: item.deadline <= now)
        self._expiry = self._earliest()
        return expired

    def untouched(self) -> list[Item]:
        """Remove and return everything of which no row has run, in preprocess or in a batch: what has begun is to be finished."""
        begun = {i.ticket for g in self._groups.values() for i in g.queue if i.taken or i.begun} | {
            i.ticket for i in self._alone if i.taken or i.begun
        }
        return self._remove(lambda item: item.ticket not in begun)

    def clear(self) -> list[Item]:
        """Remove and return everything."""
        return self._remove(lambda _: True)

    def ran(self, batch: Batch, seconds: float | None, now: float) -> None:
        """Note that a batch has ended, and learn from it: it took so long, or None when it did not go well."""
        for waiting in self._groups.values():
            if waiting.rows:
                waiting.freed(now)
        group = self._groups.get(batch.key)
        if group is None or seconds is None:
            return
        fit = group.fit
        if fit.good:  # before it learns of this batch
            self._prediction.ran(fit.predict(batch.rows), seconds)
        fit.add(batch.rows, seconds)
        limit = self._limit(batch.key, group.allowed)
        if group.tuning is not None:
            group.tuning.ran(batch.rows, [now - share.item.arrived for share in batch.shares], limit, fit)
            group.allow(self._batch_share)
            self._lowest = 0
        self._service.ran(batch.rows, seconds, limit, fit)

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Tell of batches and limits, with models by name: `closed`, `sizes` and `prediction` only grow, see Account.

        `groups` names at most those 64 that ran most.
        """
        groups = sorted(self._groups.values(), key=lambda g: -g.account.batches)
        everything = Account()
        by_model: dict[int, Account] = {}
        for model, account in [*self._past.items(), *((g.key[0], g.account) for g in groups if g.account.batches)]:
            everything.include(account)
            by_model.setdefault(model, Account()).include(account)
        return {
            "closed": {str(reason): count for reason, count in everything.closed.items()},
            "sizes": {names[model]: {"counts": a.sizes, "samples": a.rows} for model, a in by_model.items()},
            "prediction": self._prediction.describe(),
            "groups": [
                {"model": names[g.key[0]], "bucket": g.key[1], **g.describe(self.limit(g.key), self.window_share)}
                for g in groups[:_DESCRIBED]
            ],
        }

    def _earliest(self) -> float:
        earliest = min([i.deadline for i in self._alone]) if self._alone else NEVER
        for group in self._groups.values():
            earliest = min(earliest, group.deadline)
        return earliest

    def _limit(self, key: GroupKey, allowed: int) -> int:
        ceiling = self._ceilings.limit(key)
        return allowed if ceiling is None or ceiling >= allowed else max(1, ceiling)

    def _make(self, key: GroupKey) -> Group:
        group = self._groups[key] = Group(key, self._policies[key[0]])
        group.allow(self._batch_share)
        self._lowest = 0
        return group

    def _forget_if_done(self, group: Group) -> None:
        """Forget a bucket that a reload has taken out of the settings, tuner and all, once it is empty. Its batches stay counted."""
        if group.bucketless and not group.queue:
            del self._groups[group.key]
            self._lowest = 0
            self._past.setdefault(group.key[0], Account()).include(group.account)

    def _cut(self, group: Group, limit: int, reason: CloseReason, now: float) -> Batch:
        room = self._room(group, limit)
        waiting = group.rows
        shares = group.cut(room, now)
        rows = waiting - group.rows
        lent = self._borrow(group, shares, room - rows, now) if rows < room == limit and len(self._groups) > 1 else 0
        group.account.note(reason, rows + lent, limit, lent)
        group.feedback.ran(rows, limit)
        self._rows -= rows + lent
        self._forget_if_done(group)
        return Batch(group.key, shares, rows + lent, reason)

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

    def _borrow(self, host: Group, shares: list[Share], room: int, now: float) -> int:
        """Fill a batch of longer samples up with whole queues of shorter ones, the least shorter first; return how many rows that are."""
        model, bound = host.key
        deadline = min([share.item.deadline for share in shares])
        rows = sum([s.stop - s.start for s in shares])
        lent = 0
        shorter = [g for k, g in self._groups.items() if g.queue and k[0] == model and 0 < k[1] < (bound or NEVER)]
        for group in sorted(shorter, key=lambda g: -g.key[1]):
            if group.rows <= room - lent and group.joins(host, rows + lent, deadline, now):
                deadline = min(deadline, group.deadline)
                waiting = group.rows
                shares += group.cut(room - lent, now)
                lent += waiting - group.rows
                self._forget_if_done(group)
        return lent

    def _take_alone(self, item: Item) -> Batch:
        group = self._groups.get(item.key) or self._make(item.key)
        limit = self._limit(item.key, group.allowed)
        start = item.taken
        item.taken = stop = min(item.rows, start + limit)
        self._rows -= stop - start
        if stop == item.rows:
            self._alone.remove(item)
        group.account.note(CloseReason.ALONE, stop - start, limit, 0)
        self._forget_if_done(group)
        return Batch(item.key, [Share(item, start, stop)], stop - start, CloseReason.ALONE)

    def _remove(self, wanted: Callable[[Item], bool]) -> list[Item]:
        removed = [i for i in self._alone if wanted(i)]
        if removed:
            self._alone = [i for i in self._alone if not wanted(i)]
        for group in list(self._groups.values()):
            gone = [i for i in group.queue if wanted(i)]
            if gone:
                removed += gone
                group.queue = [i for i in group.queue if not wanted(i)]
                group.count()
                self._forget_if_done(group)
        self._rows -= sum([i.rows - i.taken for i in removed])
        return removed
