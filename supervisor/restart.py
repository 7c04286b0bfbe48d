"""When a dead worker is started again: growing delays with jitter, and a limit on restarts within a period.

After OTP's restart intensity (at most max_restarts in restart_period_s) with the delays that OTP lacks. Delays go back to the first
only after a stable time that included real batches: a worker that dies at its first request is not stable however long it waited for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The numbers of [supervision] that rule restarts."""

    delays_s: Sequence[float]
    stable_after_s: float
    max_restarts: int
    period_s: float
    #: A parked slot is tried once more after this time: what was broken may have been mended by somebody who does not know of us.
    half_open_s: float = 900.0
    #: Half of the delay is random, upwards only, so that workers that died together do not load together.
    jitter: float = 0.5


@dataclass(slots=True)
class RestartHistory:
    """What one slot's past says: unplanned deaths within the period, and how far along the delays it is."""

    deaths: list[float]
    step: int = 0

    @classmethod
    def empty(cls) -> RestartHistory:
        """A slot without a past."""
        return cls([])


@dataclass(frozen=True, slots=True)
class Retry:
    """Start again at this instant."""

    at: float


@dataclass(frozen=True, slots=True)
class Park:
    """Do not start again, except once at `half_open_at`."""

    half_open_at: float
    reason: str


def after_death(
    policy: RestartPolicy, history: RestartHistory, now: float, *, stable: bool, rng: random.Random
) -> Retry | Park:
    """Decide on the next start after an unplanned death, and note it in the history.

    Args:
        policy: the rules.
        history: the slot's past; changed.
        now: the instant of the death.
        stable: the process had lived for stable_after_s as ready, and had run batches.
        rng: source of the jitter.
    """
    if stable:
        history.step = 0
    history.deaths = [at for at in history.deaths if at > now - policy.period_s] + [now]
    if len(history.deaths) > policy.max_restarts:
        return Park(now + policy.half_open_s, f"{len(history.deaths)} deaths in {policy.period_s:g} s")
    delay = policy.delays_s[min(history.step, len(policy.delays_s) - 1)]
    history.step += 1
    return Retry(now + delay * (1 + policy.jitter * rng.random()))
