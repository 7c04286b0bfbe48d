"""Which waiting samples run together, and when: the worker's pure batching core.

Samples group by model and length bucket and never mix. A group's batch closes when the limit is full, when min_batch are there, when the
window that began with its FIRST arrival is over (looking again never restarts it), when waiting cannot pay (see window), or when a member's
deadline comes near. Of several groups that are due, the one whose head has the highest priority and then the earliest arrival goes first.

A request of many rows is one item whose rows count one by one: it fills batches as room allows, and several batches if it is large.
Limits may change at any time and hold from the next batch on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from gpupool.spec import BatchingSpec
from gpupool.wire import MAX_PRIORITY

from .ceiling import Ceilings, GroupKey
from .fit import BatchFit
from .window import ArrivalGaps, worthwhile_wait

#: A batch starts this much earlier than a member's deadline would demand: waking up and answering take time too.
DEADLINE_MARGIN_S: Final = 0.002
#: How much longer an urgent row may run for the sake of others in its batch.
URGENT_STRETCH: Final = 1.5
_NEVER: Final = float("inf")
_ROUNDING: Final = 1e-6  # 0.29 x 100 is 28.999… in floats, and means 29


class CloseReason(StrEnum):
    """Why a batch closed."""

    FULL = "full"  # the limit is reached
    MIN = "min"  # min_batch are there
    WINDOW = "window"  # the window from the first arrival is over
    DEADLINE = "deadline"  # a member cannot wait longer
    IDLE = "idle"  # waiting would cost more than it saves
    ALONE = "alone"  # a suspect, which runs by itself


@dataclass(slots=True, eq=False)
class Item:
    """One request's rows in one bucket. `deadline` in monotonic seconds; `taken` rows have left in batches already."""

    ticket: int
    key: GroupKey
    deadline: float
    rows: int = 1
    priority: int = 5
    alone: bool = False
    owner: Any = None  # what the shell wants back with it
    arrived: float = field(default=0.0, init=False)
    taken: int = field(default=0, init=False)
    order: tuple[int, int] = field(default=(0, 0), init=False)


class Share(NamedTuple):
    """Rows `start` to `stop` of an item, in a batch."""

    item: Item
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs now."""

    key: GroupKey
    shares: list[Share]
    rows: int
    reason: CloseReason

    @property
    def tickets(self) -> list[int]:
        """The requests that the batch holds rows of."""
        return [share.item.ticket for share in self.shares]


class _Group:
    __slots__ = ("deadline", "first", "fit", "gaps", "key", "queue", "rows")

    def __init__(self, key: GroupKey, longest_s: float, min_batch: int) -> None:
        self.key = key
        self.queue: list[Item] = []  # by Item.order
        self.rows = 0
        self.first = _NEVER  # earliest arrival of those that wait
        self.deadline = _NEVER  # earliest of theirs
        self.fit = BatchFit()
        self.gaps = ArrivalGaps(longest_s, min_batch)

    def count(self) -> None:
        """Work out what follows from the queue, after items have left it."""
        queue = self.queue
        self.rows = sum(i.rows - i.taken for i in queue)
        self.first = min((i.arrived for i in queue), default=_NEVER)
        self.deadline = min((i.deadline for i in queue), default=_NEVER)


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
        self._groups: dict[GroupKey, _Group] = {}
        self._alone: list[Item] = []
        self._sequence = 0

    @property
    def rows(self) -> int:
        """Samples that wait."""
        return sum(g.rows for g in self._groups.values()) + sum(i.rows - i.taken for i in self._alone)

    def limit(self, key: GroupKey) -> int:
        """Return the largest batch of a group now: configured, steered and learned limits together."""
        limit = int(self._policies[key[0]].max_batch * self.batch_share + _ROUNDING)
        ceiling = self._ceilings.limit(key)
        return max(1, limit if ceiling is None else min(limit, ceiling))

    def lowest_limit(self) -> int:
        """Return the smallest batch limit in force among all models and buckets."""
        limit = int(min(p.max_batch for p in self._policies) * self.batch_share + _ROUNDING)
        ceiling = self._ceilings.lowest()
        return max(1, limit if ceiling is None else min(limit, ceiling))

    def longest_window(self) -> float:
        """Return the longest configured window, times the share in force, in seconds. An adaptive model waits less, see `_window`."""
        return max(p.window_ms for p in self._policies) / 1000 * self.window_share

    def configure(self, policies: Sequence[BatchingSpec]) -> None:
        """Put new settings into force. What waits keeps its bucket; forecasts start anew where nothing waits."""
        self._policies[:] = policies
        self._groups = {key: group for key, group in self._groups.items() if group.queue}
        for (model, _), group in self._groups.items():
            group.gaps = ArrivalGaps(self._window(model, 1.0), self._policies[model].min_batch)

    def add(self, item: Item, now: float) -> None:
        """Queue an item: behind all of its priority, before all of lower ones."""
        item.arrived = now
        self._sequence += 1
        item.order = (-item.priority, self._sequence)
        if item.alone:
            insort(self._alone, item, key=_order)
            return
        group = self._groups.get(item.key)
        if group is None:
            model = item.key[0]
            group = self._groups[item.key] = _Group(item.key, self._window(model, 1.0), self._policies[model].min_batch)
        queue = group.queue
        if not queue or queue[-1].order < item.order:
            queue.append(item)
        else:
            insort(queue, item, key=_order)
        group.rows += item.rows
        group.first = min(group.first, now)
        group.deadline = min(group.deadline, item.deadline)
        group.gaps.add(now, group.rows)

    def take(self, now: float) -> Batch | None:
        """Return the batch to run now, None when nothing is due. What is past its deadline is left for `expire`."""
        best: _Group | None = None
        best_reason = CloseReason.FULL
        for group in self._groups.values():
            if group.queue:
                closes_at, reason = self._closing(group)
                if closes_at <= now and (best is None or group.queue[0].order < best.queue[0].order):
                    best, best_reason = group, reason
        suspect = next((i for i in self._alone if i.deadline > now), None)
        if suspect is not None and (best is None or suspect.order < best.queue[0].order):
            return self._take_alone(suspect)
        return None if best is None else self._cut(best, best_reason, now)

    def next_deadline(self) -> float | None:
        """Return the earliest instant at which `take` or `expire` has something to do; None when nothing waits."""
        instants = [min(self._closing(g)[0], g.deadline) for g in self._groups.values() if g.queue]
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

    def ran(self, key: GroupKey, rows: int, seconds: float) -> None:
        """Learn from a batch that went well."""
        if group := self._groups.get(key):
            group.fit.add(rows, seconds)

    def _window(self, model: int, share: float) -> float:
        policy = self._policies[model]
        longest_ms = min(policy.idle_window_ms, policy.window_ms) if policy.adaptive else policy.window_ms
        return longest_ms / 1000 * share

    def _closing(self, group: _Group) -> tuple[float, CloseReason]:
        """Say when a group's batch closes, if nobody else comes, and why."""
        limit = self.limit(group.key)
        if group.rows >= limit:
            return -_NEVER, CloseReason.FULL
        model = group.key[0]
        policy = self._policies[model]
        if group.rows >= policy.min_batch:
            return -_NEVER, CloseReason.MIN
        wait, reason = self._window(model, self.window_share), CloseReason.WINDOW
        if policy.adaptive and wait:
            wait = worthwhile_wait(group.rows, wait, group.fit, group.gaps.after(group.rows))
            if not wait:
                reason = CloseReason.IDLE
        closes_at = group.first + wait
        if group.deadline != _NEVER:
            urgent_at = group.deadline - group.fit.predict(group.rows) - DEADLINE_MARGIN_S
            if urgent_at < closes_at:
                return urgent_at, CloseReason.DEADLINE
        return closes_at, reason

    def _cut(self, group: _Group, reason: CloseReason, now: float) -> Batch | None:
        room = self._room(group)
        shares: list[Share] = []
        left: list[Item] = []
        for at, item in enumerate(group.queue):
            if not room:
                left += group.queue[at:]
                break
            if item.deadline <= now:
                left.append(item)
                continue
            start = item.taken
            item.taken = stop = min(item.rows, start + room)
            room -= stop - start
            shares.append(Share(item, start, stop))
            if stop < item.rows:
                left.append(item)
        group.queue = left
        group.count()
        if not shares:
            return None
        return Batch(group.key, shares, sum(s.stop - s.start for s in shares), reason)

    def _room(self, group: _Group) -> int:
        """Return how many rows the next batch may have: the limit, and where what is urgent leads it, not much besides that.

        Who is let past a flood shall not pay for filling its batch up: that takes at most URGENT_STRETCH times what the urgent rows would
        alone. Where the run time hardly depends on the rows this changes nothing.
        """
        limit, fit = self.limit(group.key), group.fit
        if group.queue[0].priority <= MAX_PRIORITY or not fit.known or not fit.per_sample_s:
            return limit
        urgent = sum(i.rows - i.taken for i in group.queue if i.priority > MAX_PRIORITY)
        return min(limit, max(urgent, int((URGENT_STRETCH * fit.predict(urgent) - fit.fixed_s) / fit.per_sample_s)))

    def _take_alone(self, item: Item) -> Batch:
        start = item.taken
        item.taken = stop = min(item.rows, start + self.limit(item.key))
        if stop == item.rows:
            self._alone.remove(item)
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


def _order(item: Item) -> tuple[int, int]:
    return item.order
