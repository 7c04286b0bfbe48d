"""The batcher: who runs together, and when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpupool.spec import BatchingSpec
from gpupool.worker.batcher import DEADLINE_MARGIN_S, Batch, Batcher, CloseReason, Item
from gpupool.worker.ceiling import Ceilings, GroupKey

FIXED = BatchingSpec(max_batch=8, min_batch=4, window_ms=10.0, adaptive=False)
ADAPTIVE = BatchingSpec(max_batch=8, min_batch=4, window_ms=10.0, idle_window_ms=2.0)
T = 1000.0


def make(*policies: BatchingSpec) -> Batcher:
    return Batcher(list(policies or (FIXED,)), Ceilings())


def item(
    ticket: int, *, rows: int = 1, key: GroupKey = (0, 0), priority: int = 5, deadline: float = T + 100, alone: bool = False
) -> Item:
    return Item(ticket, key, deadline, rows, priority, alone)


def fill(batcher: Batcher, count: int, now: float = T, first: int = 0) -> None:
    for ticket in range(first, first + count):
        batcher.add(item(ticket), now)


def shape(batch: Batch | None) -> list[tuple[int, int, int]]:
    assert batch is not None
    return [(s.item.ticket, s.start, s.stop) for s in batch.shares]


def test_nothing_waits_nothing_runs() -> None:
    assert make().take(T) is None
    assert make().next_deadline() is None


def test_min_batch_closes_at_once() -> None:
    batcher = make()
    fill(batcher, 3)
    assert batcher.take(T) is None

    fill(batcher, 1, first=3)
    batch = batcher.take(T)

    assert batch is not None
    assert (batch.rows, batch.reason) == (4, CloseReason.MIN)
    assert batcher.rows == 0


def test_a_full_batch_takes_the_limit_and_leaves_the_rest() -> None:
    batcher = make()
    fill(batcher, 11)

    batch = batcher.take(T)

    assert batch is not None
    assert (batch.rows, batch.reason) == (8, CloseReason.FULL)
    assert batcher.rows == 3
    assert batcher.take(T) is None


def test_the_window_runs_from_the_first_arrival() -> None:
    batcher = make()
    fill(batcher, 1, T)
    fill(batcher, 1, T + 0.009, first=1)

    assert batcher.take(T + 0.0099) is None
    batch = batcher.take(T + 0.01)

    assert batch is not None
    assert (batch.rows, batch.reason) == (2, CloseReason.WINDOW)


def test_looking_again_does_not_restart_the_window() -> None:
    batcher = make()
    fill(batcher, 1)
    for step in range(10):
        assert batcher.take(T + step / 1000) is None
        assert batcher.next_deadline() == pytest.approx(T + 0.01)

    assert batcher.take(T + 0.01) is not None


def test_what_a_batch_leaves_keeps_its_own_arrival() -> None:
    batcher = make()
    fill(batcher, 8, T)
    fill(batcher, 2, T + 0.003, first=8)
    batcher.take(T + 0.004)

    assert batcher.next_deadline() == pytest.approx(T + 0.013)


def test_buckets_and_models_never_mix() -> None:
    batcher = make(FIXED, FIXED)
    for ticket, key in enumerate([(0, 0), (0, 1), (1, 0)] * 3):
        batcher.add(item(ticket, key=key), T)

    batches = [batcher.take(T + 1) for _ in range(3)]

    assert [b.key for b in batches if b] == [(0, 0), (0, 1), (1, 0)]
    assert all(b is not None and b.rows == 3 for b in batches)


def test_higher_priority_goes_first_then_arrival() -> None:
    batcher = make(BatchingSpec(max_batch=2, min_batch=2, window_ms=0.0, adaptive=False))
    for ticket, priority in enumerate([5, 1, 9, 5, 9]):
        batcher.add(item(ticket, priority=priority), T)

    order = [s.item.ticket for _ in range(3) if (b := batcher.take(T)) for s in b.shares]

    assert order == [2, 4, 0, 3, 1]


def test_what_is_urgent_takes_others_along_for_half_as_much_time_again_as_it_needs() -> None:
    batcher = make(BatchingSpec(max_batch=32))
    fill(batcher, 1)
    assert batcher.take(T + 1) is not None
    for rows in range(1, 20):
        batcher.ran((0, 0), rows, 0.010 + 0.001 * rows)
    fill(batcher, 31, first=1)
    batcher.add(item(50, priority=15), T)

    first, second = batcher.take(T), batcher.take(T)

    assert first is not None
    assert first.tickets[0] == 50
    assert first.rows == 6  # 10 + 6 ms, and alone it would take 10 + 1
    assert second is not None
    assert second.rows == 26


def test_where_rows_cost_nothing_what_is_urgent_leads_a_full_batch() -> None:
    batcher = make(BatchingSpec(max_batch=32))
    fill(batcher, 1)
    assert batcher.take(T + 1) is not None
    for rows in range(1, 20):
        batcher.ran((0, 0), rows, 0.010)
    fill(batcher, 40, first=1)
    batcher.add(item(50, priority=15), T)

    first = batcher.take(T)

    assert first is not None
    assert (first.tickets[0], first.rows) == (50, 32)


def test_a_large_request_is_split_over_batches_in_order() -> None:
    batcher = make()
    batcher.add(item(1, rows=20), T)
    batcher.add(item(2), T)

    assert shape(batcher.take(T)) == [(1, 0, 8)]
    assert shape(batcher.take(T)) == [(1, 8, 16)]
    assert shape(batcher.take(T)) == [(1, 16, 20), (2, 0, 1)]


def test_a_suspect_runs_alone_and_at_once() -> None:
    batcher = make()
    fill(batcher, 3)
    batcher.add(item(10, alone=True), T)

    assert batcher.next_deadline() == T
    assert shape(batcher.take(T)) == [(10, 0, 1)]
    assert batcher.take(T) is None


def test_a_suspect_of_many_rows_keeps_to_the_limit() -> None:
    batcher = make()
    batcher.add(item(10, rows=10, alone=True), T)

    assert shape(batcher.take(T)) == [(10, 0, 8)]
    assert shape(batcher.take(T)) == [(10, 8, 10)]
    assert batcher.rows == 0


def test_a_near_deadline_closes_early() -> None:
    batcher = make()
    batcher.add(item(1, deadline=T + 0.005), T)

    assert batcher.next_deadline() == pytest.approx(T + 0.005 - DEADLINE_MARGIN_S)
    batch = batcher.take(T + 0.005 - DEADLINE_MARGIN_S)
    assert batch is not None
    assert batch.reason is CloseReason.DEADLINE


def test_a_deadline_counts_the_expected_run() -> None:
    batcher = make()
    for _ in range(20):
        fill(batcher, 4)
        batcher.take(T)
        batcher.ran((0, 0), 4, 0.05)
    batcher.add(item(99, deadline=T + 0.055), T)

    assert batcher.next_deadline() == pytest.approx(T + 0.005 - DEADLINE_MARGIN_S)


def test_the_expired_are_never_started() -> None:
    batcher = make()
    batcher.add(item(1, deadline=T + 1), T)
    batcher.add(item(2, deadline=T + 9), T)

    assert shape(batcher.take(T + 1)) == [(2, 0, 1)]
    assert [i.ticket for i in batcher.expire(T + 1)] == [1]
    assert batcher.take(T + 2) is None


def test_a_cancelled_request_leaves_with_what_was_not_taken() -> None:
    batcher = make()
    batcher.add(item(1, rows=20), T)
    batcher.take(T)

    assert [(i.ticket, i.taken) for i in batcher.cancel(1)] == [(1, 8)]
    assert batcher.cancel(1) == []
    assert batcher.rows == 0


def test_untouched_gives_back_only_what_was_not_begun() -> None:
    batcher = make()
    batcher.add(item(1, rows=10), T)
    batcher.take(T)
    batcher.add(item(2), T)

    assert [i.ticket for i in batcher.untouched()] == [2]
    assert batcher.rows == 2


def test_a_smaller_share_of_the_batch_holds_from_the_next_batch() -> None:
    batcher = make()
    fill(batcher, 16)
    assert len(shape(batcher.take(T))) == 8

    batcher.batch_share = 0.5

    assert len(shape(batcher.take(T))) == 4
    assert batcher.lowest_limit() == 4


def test_a_limit_never_falls_below_one() -> None:
    batcher = make()
    batcher.batch_share = 0.001
    fill(batcher, 2)

    assert len(shape(batcher.take(T))) == 1


def test_a_ceiling_limits_its_own_bucket() -> None:
    ceilings = Ceilings()
    batcher = Batcher([FIXED], ceilings)
    ceilings.failed((0, 1), 4)
    for ticket in range(6):
        batcher.add(item(ticket, key=(0, ticket % 2)), T)

    sizes = {b.key: b.rows for _ in range(2) if (b := batcher.take(T + 1))}

    assert sizes == {(0, 0): 3, (0, 1): 2}
    assert batcher.lowest_limit() == 2


def test_a_smaller_share_of_the_window_closes_sooner() -> None:
    batcher = make()
    batcher.window_share = 0.2
    fill(batcher, 1)

    assert batcher.next_deadline() == pytest.approx(T + 0.002)


def test_the_adaptive_window_is_the_idle_window_while_nothing_is_known() -> None:
    batcher = make(ADAPTIVE)
    fill(batcher, 1)

    assert batcher.next_deadline() == pytest.approx(T + 0.002)


def test_a_lone_client_pays_no_window_once_the_fit_knows() -> None:
    batcher, now = make(ADAPTIVE), T
    for ticket in range(20):
        batcher.add(item(ticket), now)
        batch = batcher.take(now + 0.002)
        assert batch is not None
        batcher.ran(batch.key, batch.rows, 0.010)
        now += 0.0125

    batcher.add(item(99, deadline=now + 9), now)
    batch = batcher.take(now)

    assert batch is not None
    assert batch.reason is CloseReason.IDLE


def test_clients_that_come_in_bursts_are_waited_for() -> None:
    batcher, now = make(ADAPTIVE), T
    for ticket in range(0, 60, 3):
        for k in range(3):
            batcher.add(item(ticket + k), now + k * 0.0001)
        batch = batcher.take(now + 0.003)
        assert batch is not None
        batcher.ran(batch.key, batch.rows, 0.020)
        now += 0.023

    batcher.add(item(97, deadline=now + 9), now)
    assert batcher.take(now) is None
    assert batcher.next_deadline() == pytest.approx(now + 0.002)

    for ticket in (98, 99):
        batcher.add(item(ticket, deadline=now + 9), now)
    batch = batcher.take(now)
    assert batch is not None
    assert (batch.rows, batch.reason) == (3, CloseReason.IDLE), "after the third of three nobody comes"


def test_new_settings_hold_from_the_next_batch() -> None:
    batcher = make()
    fill(batcher, 10)

    batcher.configure([BatchingSpec(max_batch=2, min_batch=1, window_ms=0.0, adaptive=False)])

    assert len(shape(batcher.take(T))) == 2
    assert batcher.lowest_limit() == 2
    assert batcher.rows == 8


class BatcherMachine(RuleBasedStateMachine):
    """Every row leaves exactly once, batches stay within their bounds, and order holds within a priority."""

    @initialize()
    def start(self) -> None:
        self.ceilings = Ceilings()
        self.batcher = Batcher([FIXED, ADAPTIVE], self.ceilings)
        self.now = T
        self.tickets = 0
        self.waiting: dict[int, int] = {}  # ticket -> rows not yet left
        self.rows: dict[int, int] = {}
        self.ended: Counter[str] = Counter()

    @rule(
        key=st.tuples(st.integers(0, 1), st.integers(0, 2)),
        rows=st.integers(1, 20),
        priority=st.integers(0, 9),
        timeout=st.floats(0.001, 1.0),
        alone=st.booleans(),
    )
    def add(self, key: GroupKey, rows: int, priority: int, timeout: float, alone: bool) -> None:
        self.tickets += 1
        self.waiting[self.tickets] = self.rows[self.tickets] = rows
        self.batcher.add(Item(self.tickets, key, self.now + timeout, rows, priority, alone), self.now)

    @rule(step=st.floats(0.0, 0.1))
    def pass_time(self, step: float) -> None:
        self.now += step

    @rule(batch=st.floats(0.01, 1.0), window=st.floats(0.01, 1.0))
    def steer(self, batch: float, window: float) -> None:
        self.batcher.batch_share, self.batcher.window_share = batch, window

    @rule(key=st.tuples(st.integers(0, 1), st.integers(0, 2)), rows=st.integers(2, 8))
    def run_out_of_memory(self, key: GroupKey, rows: int) -> None:
        self.ceilings.failed(key, rows)

    @rule(seconds=st.floats(0.0, 0.2))
    def take(self, seconds: float) -> None:
        batch = self.batcher.take(self.now)
        if batch is None:
            return
        assert 0 < batch.rows <= self.batcher.limit(batch.key)
        assert batch.rows == sum(s.stop - s.start for s in batch.shares)
        assert {s.item.key for s in batch.shares} == {batch.key}
        assert all(s.item.deadline > self.now for s in batch.shares)
        assert len(batch.shares) == 1 or not any(s.item.alone for s in batch.shares)
        orders = [(-s.item.priority, s.item.ticket) for s in batch.shares]
        assert orders == sorted(orders)
        for share in batch.shares:
            ticket = share.item.ticket
            assert share.start == self.rows[ticket] - self.waiting[ticket]
            self._leave(ticket, share.stop - share.start)
        self.batcher.ran(batch.key, batch.rows, seconds)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.integers(0, self.tickets + 1))
        removed = self.batcher.cancel(ticket)
        assert len(removed) == (1 if self.waiting.get(ticket) else 0)
        for gone in removed:
            self._leave(gone.ticket, gone.rows - gone.taken)

    @rule()
    def expire(self) -> None:
        for gone in self.batcher.expire(self.now):
            assert gone.deadline <= self.now
            self._leave(gone.ticket, gone.rows - gone.taken)
        expiry = self.batcher.next_expiry()
        assert expiry is None or expiry > self.now

    @rule()
    def wait_as_told(self) -> None:
        """At the instant that the batcher names there is something to do."""
        deadline = self.batcher.next_deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            expired = self.batcher.expire(self.now)
            for gone in expired:
                self._leave(gone.ticket, gone.rows - gone.taken)
            batch = self.batcher.take(self.now)
            assert expired or batch is not None
            for share in batch.shares if batch else ():
                self._leave(share.item.ticket, share.stop - share.start)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "waiting"):
            assert self.batcher.rows == sum(self.waiting.values())

    def _leave(self, ticket: int, rows: int) -> None:
        self.waiting[ticket] -= rows
        assert self.waiting[ticket] >= 0


BatcherMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBatcherMachine = BatcherMachine.TestCase
