"""Arrivals in virtual time: Poisson, in bursts, and a day that is a minute long. The same seed makes the same instants."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

Arrivals = list[float]


def poisson(rate: float, seconds: float, seed: int) -> Arrivals:
    """So many a second at random."""
    return list(_thinned(lambda _: rate, rate, seconds, random.Random(seed)))


def bursty(
    rate: float, seconds: float, seed: int, *, quiet_s: float = 1.0, burst_s: float = 0.1, times: float = 8.0
) -> Arrivals:
    """Quiet times and bursts, each of random length with this mean, bursts so many times denser; `rate` a second on the whole."""
    rng = random.Random(seed)
    quiet_rate = rate * (quiet_s + burst_s) / (quiet_s + times * burst_s)
    changes, at, bursting = [0.0], 0.0, False
    while at < seconds:
        at += rng.expovariate(1 / (burst_s if bursting else quiet_s))
        changes.append(at)
        bursting = not bursting

    def rate_at(instant: float) -> float:
        while len(changes) > 1 and changes[1] <= instant:
            changes.pop(0)
            state[0] = not state[0]
        return quiet_rate * (times if state[0] else 1.0)

    state = [False]
    return list(_thinned(rate_at, quiet_rate * times, seconds, rng))


def diurnal(rate: float, seconds: float, seed: int) -> Arrivals:
    """From nearly nothing to twice `rate` and back, once: a day."""

    def rate_at(instant: float) -> float:
        return rate * (1.02 - math.cos(2 * math.pi * instant / seconds))

    return list(_thinned(rate_at, 2.02 * rate, seconds, random.Random(seed)))


def _thinned(rate_at: Callable[[float], float], most: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """A Poisson process whose rate changes: candidates at the highest rate, each kept with the share that is due (Lewis and Shedler)."""
    at = 0.0
    while (at := at + rng.expovariate(most)) < seconds:
        if rng.random() * most < rate_at(at):
            yield at
