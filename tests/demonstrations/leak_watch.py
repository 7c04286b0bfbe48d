"""The leak watch before made-up histories of memory: how soon a leak is told, and how often what only looks like one. No pool, no waiting."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from demonstrations.finding import Finding, below, equal, told
from support import memory_series as series
from support.memory_series import Outcome

#: Histories of each kind for a second that is given, and their length.
_PER_S: Final = 2 / 3
_HOURS: Final = 12.0
_DAYS: Final = 2
#: A kind may raise the alarm in this part of its histories: 12 hours each, of the worst of their kind.
_FALSE: Final = 0.02


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Judge them by the default rules: 64 MiB per hour, over an hour of work."""
    count = max(10, int(_PER_S * seconds))
    findings: list[Finding] = []
    for name, shape in series.HARMLESS.items():
        outcomes = [_watch(shape, seed, _HOURS) for seed in range(count)]
        false = [outcome for outcome in outcomes if outcome.alarm_h is not None]
        findings.append(below(f"{name}: {len(false)} alarms in {count} x 12 h, a share of", len(false) / count, _FALSE, ""))
    for rate in (32.0, 64.0, 80.0, 128.0, 1024.0):
        for words, leak in (("steadily", series.leak), ("by request, load up and down by a quarter", series.leak_by_requests)):

            def shape(rng: random.Random, leak: Callable[..., series.Shape] = leak, rate: float = rate) -> series.Shape:
                return leak(rng, rate)

            found = sorted(a for seed in range(count) if (a := _watch(shape, seed, _HOURS).alarm_h) is not None)
            what = f"{rate:g} MiB per hour {words}: told in"
            if rate < 64.0:
                findings.append(equal(what, f"{len(found)} of {count}", f"0 of {count}"))
            else:
                text = f"{len(found)} of {count}, after {median(found):.2f} h of work, {found[-1]:.2f} h at the latest"
                findings.append(Finding(what, text, f"{count} of {count}", len(found) == count))
    by_day = [_watch(lambda rng: series.leak_by_day(rng, 128.0), seed, 24.0 * _DAYS).alarm_h for seed in range(count // 4)]
    known = sorted(at for at in by_day if at is not None)
    text = f"{len(known)} of {len(by_day)}, after {median(known):.1f} h, {known[-1]:.1f} h at the latest" if known else "never"
    findings.append(told("128 MiB per hour by request, load by day and night, two days: told in", text))
    return findings


def _watch(shape: Callable[[random.Random], series.Shape], seed: int, hours: float) -> Outcome:
    rng = random.Random(seed)
    return series.watch(shape(rng), rng, hours)
