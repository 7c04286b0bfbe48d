"""Made-up histories of one worker's memory, hour after hour: what a leak looks like, and what only looks like one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from gpupool.supervisor.leak import LeakPolicy, Trend

MIB: Final = 1 << 20
HOUR_S: Final = 3600.0
POLICY: Final = LeakPolicy()
#: How often the watch looks at most.
LOOK_S: Final = 5.0

#: Bytes held above the base, and samples a second, at a time in seconds.
Shape = Callable[[float], tuple[float, float]]


@dataclass(frozen=True)
class Outcome:
    """What the watch made of one history: hours until its first alarm (None: there was none), and whether it stood at the end."""

    alarm_h: float | None
    at_the_end: bool


def leak(rng: random.Random, mib_per_hour: float) -> Shape:
    """So much more in every hour of steady work."""
    return lambda t: (mib_per_hour * MIB * t / HOUR_S, 50.0)


def leak_by_requests(rng: random.Random, mib_per_hour: float) -> Shape:
    """So much for every request, of which there are more and fewer, a quarter up and down within twenty minutes."""
    phase = rng.random()

    def shape(t: float) -> tuple[float, float]:
        w = 2 * math.pi / 1200
        served = t - 0.25 / w * (math.cos(w * t + phase) - math.cos(phase))
        return mib_per_hour * MIB * served / HOUR_S, 50.0 * (1 + 0.25 * math.sin(w * t + phase))

    return shape


def flat(rng: random.Random) -> Shape:
    """Nothing."""
    return lambda t: (0.0, 50.0)


def warm_up(rng: random.Random) -> Shape:
    """Grows by up to 2 GiB and levels off, within up to an hour (the time in which it comes to two thirds)."""
    most, settle_s = rng.uniform(50, 2048) * MIB, rng.uniform(60, 2400)
    return lambda t: (most * (1 - math.exp(-t / settle_s)), 50.0)


def plateaus(rng: random.Random) -> Shape:
    """An allocator that takes another piece of up to 256 MiB when a larger request than all before comes: seldom, and more and more so."""
    steps = [(300.0 * 2**n * rng.uniform(0.6, 1.4), rng.uniform(8, 256) * MIB) for n in range(9)]
    return lambda t: (sum(size for at, size in steps if t >= at), 50.0)


def collector(rng: random.Random) -> Shape:
    """A saw: up to 512 MiB collect, and are given back every 10 s to 45 minutes."""
    height, period_s = (
        rng.uniform(10, 512) * MIB,
        rng.choice([10.0, 60.0, 300.0, 900.0, 1800.0, 2250.0]) * rng.uniform(0.8, 1.2),
    )
    return lambda t: (height * (t / period_s % 1.0), 50.0)


def load_changes(rng: random.Random) -> Shape:
    """The load changes every half hour to three hours, and up to 1 GiB with it."""
    size = rng.uniform(64, 1024) * MIB
    edges, at = list[tuple[float, float]](), 0.0
    while at < 48 * HOUR_S:
        edges.append((at, rng.random()))
        at += rng.uniform(1800, 3 * HOUR_S)

    def shape(t: float) -> tuple[float, float]:
        load = next(level for start, level in reversed(edges) if t >= start)
        return size * load, 5 + 95 * load

    return shape


def day_and_night(rng: random.Random) -> Shape:
    """The load comes and goes with the day, and up to 1 GiB with it."""
    size, phase = rng.uniform(64, 1024) * MIB, rng.random() * 2 * math.pi

    def shape(t: float) -> tuple[float, float]:
        load = (1 + math.sin(2 * math.pi * t / (24 * HOUR_S) + phase)) / 2
        return size * load, 1 + 99 * load

    return shape


HARMLESS: Final = {
    "nothing but noise": flat, "warm-up that levels off": warm_up, "an allocator's plateaus": plateaus, "a collector's saw": collector,
    "a load that changes": load_changes, "day and night": day_and_night,
}  # fmt: skip


def watch(shape: Shape, rng: random.Random, hours: float, *, noise_mib: float = 20.0, policy: LeakPolicy = POLICY) -> Outcome:
    """Show a history to the watch, with noise: what batches hold for a moment, half-normal, and work that comes at random."""
    trend, samples, first = Trend(policy), 0.0, None
    for t, held, rate in looks(shape, hours, policy):
        samples += max(0.0, rng.gauss(rate * LOOK_S, math.sqrt(rate * LOOK_S)))
        if trend.observe(int(500 * MIB + held + abs(rng.gauss(0, noise_mib)) * MIB), int(samples), t) and trend.suspected:
            first = t / HOUR_S if first is None else first
    return Outcome(first, trend.suspected)


def looks(shape: Shape, hours: float, policy: LeakPolicy) -> Iterator[tuple[float, float, float]]:
    """The instants at which the watch looks, and what it would see but for the noise."""
    t = 0.0
    while t < hours * HOUR_S:
        held, rate = shape(t)
        yield t, held, rate
        t += LOOK_S


def leak_by_day(rng: random.Random, mib_per_hour: float) -> Shape:
    """So much for every request, on average, of a load that comes and goes with the day and takes up to 256 MiB with it."""
    size, phase, w = rng.uniform(16, 256) * MIB, rng.random() * 2 * math.pi, 2 * math.pi / (24 * HOUR_S)

    def shape(t: float) -> tuple[float, float]:
        load = 1 + 0.8 * math.sin(w * t + phase)
        served = t - 0.8 / w * (math.cos(w * t + phase) - math.cos(phase))
        return size * load / 1.8 + mib_per_hour * MIB * served / HOUR_S, 50 * load

    return shape
