"""A few at once, then one after another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.pacing import StartPacer


@given(st.lists(st.floats(0.0, 1.0), max_size=50))
def test_no_window_holds_more_starts_than_burst_and_rate_allow(waits: list[float]) -> None:
    pacer, now, starts = StartPacer(burst=2, every_s=0.2), 100.0, []
    for wait in waits:
        now = max(now + wait, pacer.earliest())
        pacer.take(now)
        starts.append(now)
    for first in range(len(starts)):
        for last in range(first + 1, len(starts)):
            assert last - first + 1 <= 2 + (starts[last] - starts[first]) / 0.2 + 1e-6
