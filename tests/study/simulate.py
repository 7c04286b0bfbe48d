"""One worker in virtual time: the real batcher, a device whose batches cost a + b n with some noise, and nobody who sleeps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final
from unittest import mock

from gpupool.spec import BatchingSpec
from gpupool.worker.batch import Item
from gpupool.worker.batcher import Batcher
from gpupool.worker.ceiling import Ceilings
from gpupool.worker.window import Feedback

#: How long a client of a closed loop takes from a reply to its next request, on the average.
_THINK_S: Final = 0.0005
_NOISE: Final = 0.05
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a batch takes, in seconds: every one, and for each sample."""

    fixed_s: float
    each_s: float

    def __str__(self) -> str:
        return f"{1000 * self.fixed_s:g} + {1000 * self.each_s:g} n ms"


#: Full batches of 32 make 2,000 samples a second, batches of one 121.
LARGE: Final = Cost(0.008, 0.00025)
#: 12,300 and 952.
SMALL: Final = Cost(0.001, 0.00005)


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to batch."""

    name: str
    batching: BatchingSpec
    feedback: bool = True


POLICIES: Final = (
    Policy("no window", BatchingSpec(min_batch=1, window_ms=0.0, idle_window_ms=0.0, adaptive=False)),
    Policy("fixed, 5 ms", BatchingSpec(adaptive=False)),
    Policy("adaptive", BatchingSpec(), feedback=False),
    Policy("adaptive, feedback", BatchingSpec()),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the arrivals. Latencies in seconds, sorted."""

    latencies: Sequence[float]
    batches: int
    busy: float  # share of the time that the device works
    per_s: float
    reasons: Counter[str]

    def ms(self, share: float) -> float:
        """A percentile in milliseconds."""
        return 1000 * self.latencies[min(len(self.latencies) - 1, int(share * len(self.latencies)))]

    @property
    def mean_batch(self) -> float:
        """Samples in a batch."""
        return len(self.latencies) / self.batches


def run(policy: Policy, cost: Cost, arrivals: Sequence[float], *, again_until: float = 0.0, seed: int = 1) -> Outcome:
    """Serve the arrivals; time jumps from event to event. Until `again_until` whoever is answered asks again (a closed loop)."""
    rng = random.Random(seed)
    coming = sorted(arrivals)
    latencies: list[float] = []
    reasons: Counter[str] = Counter()
    now, busy, ticket = 0.0, 0.0, 0
    with _feedback(on=policy.feedback):
        batcher = Batcher([policy.batching], Ceilings())

        def arrive(until: float) -> None:
            nonlocal ticket
            while coming and coming[0] <= until:
                ticket += 1
                at = heappop(coming)
                batcher.add(Item(ticket, (0, 0), at + _TIMEOUT_S), at)

        while coming or batcher.rows:
            if (batch := batcher.take(now)) is not None:
                took = (cost.fixed_s + cost.each_s * batch.rows) * rng.uniform(1 - _NOISE, 1 + _NOISE)
                now += took
                arrive(now)  # while it runs
                latencies += [now - share.item.arrived for share in batch.shares]
                batcher.ran(batch, took, now)
                busy += took
                reasons[batch.reason] += 1
                if now < again_until:
                    for _ in batch.shares:
                        heappush(coming, now + rng.expovariate(1 / _THINK_S))
                continue
            due = batcher.next_deadline()
            if coming and (due is None or coming[0] <= max(due, now)):
                now = max(now, coming[0])
                arrive(now)
            elif due is not None:
                now = max(now, due)
    latencies.sort()
    return Outcome(latencies, reasons.total(), busy / now, len(latencies) / now, reasons)


@contextmanager
def _feedback(*, on: bool) -> Iterator[None]:
    """Leave the feedback as it is, or let it leave all of the window always."""
    if on:
        yield
    else:
        with mock.patch.object(Feedback, "ran", lambda *_: None):
            yield
