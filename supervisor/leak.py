"""Does the memory of one process rise steadily while it works steadily? A robust slope, and what else must hold before it is called a leak.

Time counts only while work goes on, and is cut into cells. A cell keeps the least that was held in it: what a batch needs for a moment, and
what a garbage collector has not yet got to, stands above that floor and does not show. The slope is the median of the slopes between all
pairs of floors (Theil and Sen), so that a few odd cells do not move it.

A slope alone is no leak: warm-up, an allocator's plateau, a load that grew and a collector that comes seldom have one, too. So the window is
also cut into six parts, and from each to the next the floor must rise, by like amounts: a step rises once, what levels off rises less and
less, what comes and goes falls again. The last floor must be higher than all before the window: what has been there before is no growth.
And the work must not have grown on the way: memory that follows the load is no leak.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import Final

#: Cells in a window: 630 pairs.
CELLS: Final = 36
_PARTS: Final = 6
_PART: Final = CELLS // _PARTS
#: The first cells of a process's work are not looked at: what is made at first use is made there.
WARM_UP_CELLS: Final = CELLS // 4
#: The least rise between parts as a share of the largest. A leak's are alike; those of what levels off shrink from one to the next.
ALIKE: Final = 0.6
#: How far the work of the cells may go up together with time (Kendall's tau; work that comes at random: 0 with a deviation of 0.11).
STEADY: Final = 0.3
#: A time without a look, in cells, after which the present cell begins anew.
_GAP: Final = 2
#: An alarm ends when the slope has fallen below this share of the limit.
OVER: Final = 0.5
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class LeakPolicy:
    """The slope that is called a leak, in bytes per hour of work (0: none is), and the work that it is judged over, in seconds."""

    bytes_per_hour: int = 64 << 20
    window_s: float = 3600.0

    @property
    def cell_s(self) -> float:
        """The length of one cell."""
        return self.window_s / CELLS


@dataclass(frozen=True, slots=True)
class Slope:
    """What a whole window says. `growth_bytes` is counted from the end of warm-up, `worked_s` ago in time with work."""

    bytes_per_hour: float
    growth_bytes: int
    worked_s: float
    steady: bool  # all that must hold besides the slope holds


class Trend:
    """One kind of memory of one process. `slope` is None until a whole window has been seen."""

    def __init__(self, policy: LeakPolicy) -> None:
        self.policy = policy
        self.slope: Slope | None = None
        self.suspected = False
        self._floors: deque[int] = deque(maxlen=CELLS)
        self._work: deque[int] = deque(maxlen=CELLS)  # samples
        self._highest = 0  # of the floors before the window
        self._warm_up = WARM_UP_CELLS
        self._first_floor: int | None = None
        self._worked_cells = 0
        self._began: float | None = None  # of the present cell
        self._last = 0.0
        self._floor = 0
        self._samples = 0  # run until the cell began

    def observe(self, held_bytes: int, samples: int, now: float) -> bool:
        """Take in what is held now and how many samples have been run by now; return whether suspicion began or ended."""
        if self._began is None or now - self._last > _GAP * self.policy.cell_s:  # nobody knows what happened in it
            self._begin(held_bytes, samples, now)
            return False
        self._last = now
        self._floor = min(self._floor, held_bytes)
        ends = self._began + self.policy.cell_s
        if now < ends:
            return False
        floor, worked = self._floor, samples - self._samples
        self._begin(held_bytes, samples, now)
        self._began = ends  # looks come a little late each time: cells must not get longer by it
        return worked > 0 and self._add(floor, worked)

    def _begin(self, held_bytes: int, samples: int, now: float) -> None:
        self._began = self._last = now
        self._floor, self._samples = held_bytes, samples

    def _add(self, floor: int, work: int) -> bool:
        if self._warm_up:
            self._warm_up -= 1
            return False
        self._first_floor = floor if self._first_floor is None else self._first_floor
        self._worked_cells += 1
        if len(self._floors) == CELLS:
            self._highest = max(self._highest, self._floors[0])
        self._floors.append(floor)
        self._work.append(work)
        if len(self._floors) < CELLS:
            return False
        self.slope = self._measure(self._first_floor)
        before, limit = self.suspected, self.policy.bytes_per_hour
        if self.suspected:
            self.suspected = 0 < OVER * limit <= self.slope.bytes_per_hour
        else:
            self.suspected = self.slope.steady and 0 < limit <= self.slope.bytes_per_hour
        return self.suspected is not before

    def _measure(self, first_floor: int) -> Slope:
        cell_s, floors, work = self.policy.cell_s, list(self._floors), list(self._work)
        per_cell = median((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(floors), 2))
        lowest = [min(floors[n : n + _PART]) for n in range(0, CELLS, _PART)]
        rises = [after - before for before, after in pairwise(lowest)]
        more, less = (sum(sign * (b - a) > 0 for a, b in combinations(work, 2)) for sign in (1, -1))
        busier = (more - less) / (CELLS * (CELLS - 1) / 2)
        alike = min(rises) > 0 and min(rises) >= ALIKE * max(rises)
        steady = alike and lowest[-1] > self._highest and busier <= STEADY
        return Slope(per_cell / cell_s * _HOUR_S, floors[-1] - first_floor, self._worked_cells * cell_s, steady)
