"""What the study says of the batcher, for the seeds that it uses: exact, on every machine."""

from __future__ import annotations

from itertools import pairwise

import pytest

from study.chart import chart
from study.simulate import LARGE, POLICIES, SMALL, Cost, Outcome, Policy, run
from study.workloads import bursty, diurnal, poisson

NONE, FIXED, _, ADAPTIVE = POLICIES


def closed(policy: Policy, cost: Cost, clients: int) -> Outcome:
    return run(policy, cost, [0.0001 * n for n in range(clients)], again_until=20.0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_everybody_is_served_once(policy: Policy) -> None:
    arrivals = bursty(300, 10, 1)

    assert len(run(policy, LARGE, arrivals).latencies) == len(arrivals)


@pytest.mark.parametrize("cost", [LARGE, SMALL])
def test_low_traffic_does_not_pay_for_batching(cost: Cost) -> None:
    arrivals = poisson(20, 120, 1)
    adaptive, none = run(ADAPTIVE, cost, arrivals), run(NONE, cost, arrivals)

    assert adaptive.ms(0.5) <= none.ms(0.5) + 0.2
    assert adaptive.ms(0.99) <= none.ms(0.99) + 1.0


@pytest.mark.parametrize("clients", [3, 6, 12, 24])
def test_clients_of_a_closed_loop_find_together(clients: int) -> None:
    adaptive, none = closed(ADAPTIVE, LARGE, clients), closed(NONE, LARGE, clients)

    assert adaptive.per_s > 1.2 * none.per_s
    assert adaptive.ms(0.5) < none.ms(0.5)


def test_a_lone_client_never_waits() -> None:
    assert closed(ADAPTIVE, SMALL, 1).per_s > 0.98 * closed(NONE, SMALL, 1).per_s


def test_full_load_fills_batches() -> None:
    assert closed(ADAPTIVE, LARGE, 128).mean_batch > 0.99 * 32


def test_arrivals_come_in_order_and_as_many_as_were_asked_for() -> None:
    for found, rate in ((poisson(100, 200, 3), 100), (bursty(100, 200, 3), 100), (diurnal(100, 200, 3), 102)):
        assert all(a < b for a, b in pairwise(found))
        assert len(found) == pytest.approx(200 * rate, rel=0.15)


def test_a_chart_is_an_image() -> None:
    text = chart("t", "x", "y & z", [1.0, 10.0], {"a": [1.0, 100.0], "b": [2.0, 2.0]})

    assert text.startswith("<svg")
    assert text.count("<polyline") == 2
    assert "y &amp; z" in text
