"""The batcher: who runs together, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpupool.spec import BatchingSpec
from gpupool.worker.batch import Batch, CloseReason, Item
from gpupool.worker.batcher import Batcher
from gpupool.worker.ceiling import Ceilings, GroupKey
from gpupool.worker.group import DEADLINE_MARGIN_S, NEVER

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


def learn(batcher: Batcher, rows: int, seconds: float, key: GroupKey = (0, 0)) -> None:
    batcher.ran(Batch(key, [], rows, CloseReason.FULL), seconds, T)


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
        learn(batcher, rows, 0.010 + 0.001 * rows)
    fill(batcher, 31, first=1)
    batcher.add(item(50, priority=15), T)

    first, second = batcher.take(T), batcher.take(T + 1)

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
        learn(batcher, rows, 0.010)
    fill(batcher, 40, first=1)
    batcher.add(item(50, priority=15), T)

    first = batcher.take(T)

    assert first is not None
    assert (first.tickets[0], first.rows) == (50, 32)


def test_a_group_of_nothing_but_expired_items_does_not_stand_before_another_that_is_due() -> None:
    batcher = make(BatchingSpec(max_batch=8, min_batch=1, adaptive=False))
    batcher.add(item(1, key=(0, 8), deadline=T + 1), T)
    batcher.add(item(2, key=(0, 64)), T)

    batch = batcher.take(T + 2)

    assert batch is not None
    assert batch.tickets == [2]


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
        learn(batcher, 4, 0.05)
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
    for ticket, alone in ((3, False), (4, True)):
        preprocessed = item(ticket, alone=alone)
        preprocessed.begun = True
        batcher.add(preprocessed, T)

    assert [i.ticket for i in batcher.untouched()] == [2]
    assert batcher.rows == 4


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
        batcher.ran(batch, 0.010, now + 0.012)
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
        batcher.ran(batch, 0.020, now + 0.023)
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


def taught(costs: dict[int, tuple[float, float]], limit: int = 8) -> Batcher:
    """A batcher that knows what batches of each bucket cost: a + b n."""
    batcher = make(BatchingSpec(max_batch=limit, min_batch=limit, window_ms=10.0, adaptive=False, length_buckets=(16, 32)))
    for bucket, (fixed, each) in costs.items():
        batcher.add(item(0, key=(0, bucket)), T - 10)
        assert batcher.take(T - 9)
        for n in range(20):
            learn(batcher, 1 + n % 8, fixed + each * (1 + n % 8), (0, bucket))
    return batcher


def test_shorter_samples_fill_up_a_batch_of_longer_ones_where_that_costs_less() -> None:
    batcher = taught({16: (0.010, 0.001), 32: (0.010, 0.002)})
    for ticket in range(3):
        batcher.add(item(ticket, key=(0, 32)), T)
    for ticket in range(3, 6):
        batcher.add(item(ticket, key=(0, 16)), T + 0.001)

    batch = batcher.take(T + 0.01)

    assert batch is not None
    assert (batch.key, batch.rows, batch.tickets) == ((0, 32), 6, [0, 1, 2, 3, 4, 5])
    assert batcher.rows == 0
    assert sum(group["borrowed_rows"] for group in batcher.describe(["m"])["groups"]) == 3


def test_shorter_samples_run_apart_where_padding_costs_more_than_a_batch() -> None:
    batcher = taught({16: (0.001, 0.001), 32: (0.010, 0.005)})
    batcher.add(item(1, key=(0, 32)), T)
    batcher.add(item(2, key=(0, 16)), T + 0.001)

    assert shape(batcher.take(T + 0.01)) == [(1, 0, 1)]
    assert batcher.rows == 1


def test_longer_samples_never_join_shorter_ones_and_anything_may_join_the_unbounded() -> None:
    batcher = taught({16: (0.010, 0.001), 32: (0.010, 0.001), 0: (0.010, 0.001)})
    batcher.add(item(1, key=(0, 16)), T)
    batcher.add(item(2, key=(0, 32)), T + 0.001)
    batcher.add(item(3, key=(0, 0)), T + 0.002)

    assert shape(batcher.take(T + 0.01)) == [(1, 0, 1)]
    assert shape(batcher.take(T + 0.012)) == [(2, 0, 1)]

    batcher.add(item(4, key=(0, 16)), T + 0.012)
    assert shape(batcher.take(T + 0.012)) == [(3, 0, 1), (4, 0, 1)]


def test_nobody_joins_who_would_make_somebody_late() -> None:
    batcher = taught({16: (0.010, 0.001), 32: (0.010, 0.002)})
    batcher.add(item(1, key=(0, 32), deadline=T + 0.01 + 0.0145), T)
    batcher.add(item(2, key=(0, 16)), T + 0.001)

    assert shape(batcher.take(T + 0.01)) == [(1, 0, 1)]


def test_nobody_joins_whom_there_is_no_room_for_as_a_whole() -> None:
    batcher = taught({16: (0.010, 0.001), 32: (0.010, 0.001)}, limit=4)
    batcher.add(item(1, key=(0, 32)), T)
    batcher.add(item(2, key=(0, 32)), T)
    for ticket in range(3, 6):
        batcher.add(item(ticket, key=(0, 16)), T + 0.001)

    assert shape(batcher.take(T + 0.01)) == [(1, 0, 1), (2, 0, 1)]


def test_full_batches_let_an_adaptive_model_wait_for_more_than_min_batch() -> None:
    policy = BatchingSpec(max_batch=8, min_batch=2, window_ms=10.0, idle_window_ms=1.0)
    batcher, now = make(policy), T
    for turn in range(30):  # eight come within 0.7 ms, all the time
        for ticket in range(8):
            batcher.add(item(8 * turn + ticket, deadline=now + 9), now + ticket * 0.0001)
        batch = batcher.take(now + 0.0007)
        assert batch is not None
        batcher.ran(batch, 0.020 + 0.001 * (turn % 3), now + 0.03)
        now += 0.03
    for ticket in range(1000, 1004):
        batcher.add(item(ticket, deadline=now + 9), now)

    assert batcher.take(now) is None
    assert batcher.next_deadline() == pytest.approx(now + 0.021 / 4, rel=0.1)

    batch = batcher.take(now + 0.0055)
    assert batch is not None
    assert (batch.rows, batch.reason) == (4, CloseReason.WINDOW)


def test_batches_far_below_the_limit_leave_the_idle_window_only() -> None:
    policy = BatchingSpec(max_batch=64, min_batch=2, window_ms=10.0, idle_window_ms=1.0)
    batcher, now = make(policy), T
    for turn in range(30):
        for ticket in range(3):
            batcher.add(item(3 * turn + ticket, deadline=now + 9), now + ticket * 0.0001)
        batch = batcher.take(now + 0.02)
        assert batch is not None
        batcher.ran(batch, 0.020, now + 0.04)
        now += 0.05
    for ticket in range(1000, 1002):
        batcher.add(item(ticket, deadline=now + 9), now)

    assert batcher.take(now) is None, "the third of three comes at once"
    assert batcher.next_deadline() == pytest.approx(now + 0.001)


def test_times_that_no_line_fits_leave_the_fixed_window() -> None:
    batcher, now = make(ADAPTIVE), T
    for ticket in range(60):
        batcher.add(item(ticket, deadline=now + 9), now)
        batch = batcher.take(now + 0.002)
        assert batch is not None
        batcher.ran(batch, 0.001 if ticket % 2 else 0.050, now + 0.06)
        now += 0.1
    group = batcher.describe(["m"])["groups"][0]
    assert not group["fit"]["good"]

    for turn in range(6):  # full ones, so that the feedback leaves all of it
        for ticket in range(8):
            batcher.add(item(100 + 8 * turn + ticket, deadline=now + 9), now)
        assert batcher.take(now)
    batcher.add(item(999, deadline=now + 9), now)

    assert batcher.take(now) is None
    assert batcher.next_deadline() == pytest.approx(now + 0.002)


def test_the_objective_bounds_the_batch_and_new_settings_begin_the_search_anew() -> None:
    policy = BatchingSpec(max_batch=32, min_batch=8, p99_ms=50.0)
    batcher = make(policy)
    fill(batcher, 40)

    batch = batcher.take(T)

    assert batch is not None
    assert (batch.rows, batch.reason) == (8, CloseReason.FULL)
    assert batcher.lowest_limit() == 8

    batcher.configure([BatchingSpec(max_batch=32, min_batch=8)])
    assert batcher.limit((0, 0)) == batcher.lowest_limit() == 32


def test_what_is_told_counts_every_batch_by_reason_and_size() -> None:
    batcher = make()
    fill(batcher, 8)
    batcher.take(T)
    fill(batcher, 1, T, first=20)
    batcher.take(T + 1)
    batcher.add(item(30, alone=True), T)
    batcher.take(T)

    told = batcher.describe(["m"])

    assert told["closed"] == {"full": 1, "window": 1, "alone": 1}
    assert told["sizes"] == {"m": {"counts": [2, 0, 0, 1, *[0] * 8], "samples": 10}}
    assert told["groups"][0]["fill"] == pytest.approx((1 + 1 / 8 + 1 / 8) / 3, rel=0.001)


def test_counts_stay_when_a_bucket_is_taken_out_of_the_settings() -> None:
    batcher = make(BatchingSpec(length_buckets=(16,)))
    batcher.add(item(1, key=(0, 16)), T)
    assert batcher.take(T + 1)

    batcher.configure([FIXED])

    told = batcher.describe(["m"])
    assert told["groups"] == []
    assert sum(told["closed"].values()) == 1


def test_the_time_per_sample_is_of_all_samples_not_of_all_batches() -> None:
    batcher = make()
    fill(batcher, 1)
    batcher.take(T + 1)
    for _ in range(100):
        for rows in (1, 32):
            learn(batcher, rows, 0.010 + 0.001 * rows)

    assert batcher.service_s == pytest.approx((0.011 + 0.042) / 33, rel=0.1)


def test_a_full_batch_is_told_by_the_fit_although_only_small_ones_ran() -> None:
    batcher = make(BatchingSpec(max_batch=32))
    fill(batcher, 1)
    batcher.take(T + 1)
    assert batcher.full_row_s == 0.0
    for n in range(40):
        learn(batcher, 1 + n % 3, 0.009 + 0.001 * (1 + n % 3))

    assert batcher.full_row_s == pytest.approx(0.041 / 32)
    batcher.batch_share = 0.5
    learn(batcher, 1, 0.010)
    assert batcher.full_row_s == pytest.approx(0.041 / 32, rel=0.1)


def test_a_full_batch_is_of_what_ran_of_late_and_unknown_where_no_line_fits() -> None:
    batcher = taught({16: (0.010, 0.001), 32: (0.010, 0.004)})
    for n in range(60):
        learn(batcher, 1 + n % 8, 0.010 + 0.001 * (1 + n % 8), (0, 16))
    assert batcher.full_row_s == pytest.approx(0.018 / 8, rel=0.01)
    for n in range(60):
        learn(batcher, 1 + n % 8, 0.010 + 0.004 * (1 + n % 8), (0, 32))
    assert batcher.full_row_s == pytest.approx(0.042 / 8, rel=0.01)

    for n in range(60):
        learn(batcher, 4, (0.001, 0.1)[n % 2], (0, 32))
    assert batcher.full_row_s == 0.0


@pytest.mark.parametrize(
    "leave",
    [
        lambda b: b.take(T + 1),
        lambda b: b.cancel(1),
        lambda b: b.expire(T + 100),
        lambda b: b.clear(),
        lambda b: (b.add(item(2, key=(0, 16), alone=True), T), b.take(T + 1), b.take(T + 1)),
    ],
    ids=["run", "cancelled", "expired", "cleared", "after a suspect"],
)
def test_a_bucket_that_a_reload_has_removed_is_forgotten_with_its_tuner_as_soon_as_it_is_empty(
    leave: Callable[[Batcher], object],
) -> None:
    tuned = BatchingSpec(max_batch=32, min_batch=8, p99_ms=50.0, length_buckets=(16,))
    batcher = make(tuned)
    batcher.add(item(1, key=(0, 16)), T)
    batcher.configure([replace(tuned, length_buckets=())])
    assert batcher.lowest_limit() == 8

    leave(batcher)

    assert batcher.lowest_limit() == 32
    assert batcher.describe(["m"])["groups"] == []
    assert batcher.rows == 0


BUCKETS = (8, 64, 0)


class BatcherMachine(RuleBasedStateMachine):
    """Every row leaves exactly once, batches stay within their bounds, nobody waits past his slack, and order holds within a priority."""

    @initialize()
    def start(self) -> None:
        self.ceilings = Ceilings()
        self.policies = [replace(FIXED, length_buckets=(8, 64)), replace(ADAPTIVE, length_buckets=(8, 64), p99_ms=50.0)]
        self.batcher = Batcher(self.policies, self.ceilings)
        self.now = T
        self.tickets = 0
        self.waiting: dict[int, int] = {}  # ticket -> rows not yet left
        self.rows: dict[int, int] = {}
        self.ended: Counter[str] = Counter()

    @rule(
        key=st.tuples(st.integers(0, 1), st.sampled_from(BUCKETS)),
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

    @rule(key=st.tuples(st.integers(0, 1), st.sampled_from(BUCKETS)), rows=st.integers(2, 8))
    def run_out_of_memory(self, key: GroupKey, rows: int) -> None:
        self.ceilings.failed(key, rows)

    @rule(largest=st.integers(1, 16), adaptive=st.booleans())
    def reload(self, largest: int, adaptive: bool) -> None:
        first = replace(self.policies[0], max_batch=largest, min_batch=min(largest, 4), adaptive=adaptive)
        self.batcher.configure([first, self.policies[1]])

    @rule(fixed=st.floats(0.0, 0.05), each=st.floats(0.0, 0.01), key=st.tuples(st.integers(0, 1), st.sampled_from(BUCKETS)))
    def teach(self, fixed: float, each: float, key: GroupKey) -> None:
        for rows in range(1, 10):
            learn(self.batcher, rows, fixed + each * rows, key)

    @rule(seconds=st.floats(0.0, 0.2))
    def take(self, seconds: float) -> None:
        limits = {(model, bucket): self.batcher.limit((model, bucket)) for model in (0, 1) for bucket in BUCKETS}
        batch = self.batcher.take(self.now)
        if batch is None:
            self.nobody_waits_past_his_slack()
            return
        assert 0 < batch.rows <= limits[batch.key]
        self._took(batch)
        self.now += seconds
        self.batcher.ran(batch, seconds, self.now)

    def nobody_waits_past_his_slack(self) -> None:
        for group in self.batcher._groups.values():
            for waiting in group.queue:
                assert waiting.deadline <= self.now or waiting.deadline - group.needs_s(group.rows) > self.now

    def _took(self, batch: Batch) -> None:
        assert batch.rows == sum(s.stop - s.start for s in batch.shares)
        assert {s.item.key[0] for s in batch.shares} == {batch.key[0]}, "models are mixed"
        assert all((s.item.key[1] or NEVER) <= (batch.key[1] or NEVER) for s in batch.shares), (
            "a longer sample in a shorter batch"
        )
        assert all(s.item.deadline > self.now for s in batch.shares)
        assert len(batch.shares) == 1 or not any(s.item.alone for s in batch.shares)
        for key in {s.item.key for s in batch.shares}:
            orders = [(-s.item.priority, s.item.ticket) for s in batch.shares if s.item.key == key]
            assert orders == sorted(orders)
        for share in batch.shares:
            ticket = share.item.ticket
            assert share.start == self.rows[ticket] - self.waiting[ticket]
            self._leave(ticket, share.stop - share.start)

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
            if batch:
                self._took(batch)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "waiting"):
            assert self.batcher.rows == sum(self.waiting.values())

    def _leave(self, ticket: int, rows: int) -> None:
        self.waiting[ticket] -= rows
        assert self.waiting[ticket] >= 0


BatcherMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBatcherMachine = BatcherMachine.TestCase


def test_predictions_are_summed_beside_what_batches_took_once_the_fit_is_good() -> None:
    batcher = make(BatchingSpec(max_batch=8))
    fill(batcher, 8)
    batcher.take(T)
    for rows in (2, 4, 6, 8) * 4:
        learn(batcher, rows, 0.010 + 0.001 * rows)
    told = batcher.describe(["m"])["prediction"]
    assert 0 < told["batches"] < 16, "the first ones were not predicted"
    assert told["predicted_s"] == pytest.approx(told["measured_s"], rel=0.02)

    for _ in range(4):
        learn(batcher, 8, 0.036)  # twice as slow as it was

    after = batcher.describe(["m"])["prediction"]
    assert after["measured_s"] - told["measured_s"] > 1.2 * (after["predicted_s"] - told["predicted_s"]) > 0
