"""Work for the overflow workers: what they get while there is pressure, and what pressure is.

They are extra CPU workers, slower than the others. Nothing is sent there as long as the others come along: only when the backlog, in
requests, bytes or predicted time, or the devices' memory has been nearly full for a while, the least important of what waits goes there, of
that the oldest. Of a fair queue the oldest are those of whoever floods it. What could not be done there in time stays, and so does a
suspect, which never waits here.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from gpupool.link import WorkFlag
from gpupool.spec import RouterSpec

from .forecast import Forecast
from .ledger import Ledger
from .pressure import LOW, Pressure
from .requests import Request
from .workers import Fleet, Worker

#: Requests looked at in one search, and the time until the next: of a long backlog that cannot be done in time, no turn sees much.
_MOST_LOOKED_AT: Final = 256
_EVERY_S: Final = 0.01


class Overflow:
    """What the overflow workers of one router get. `memory` is the fullest device's share in use, as the supervisor last told it."""

    def __init__(self, spec: RouterSpec, ledger: Ledger, fleet: Fleet, forecast: Forecast) -> None:
        self.configured = spec.overflow > 0
        self.target_delay_s = spec.target_delay_ms / 1e3
        self.memory = 0.0
        self.sent = 0
        self._ledger, self._fleet, self._forecast = ledger, fleet, forecast
        self._pressure = Pressure()
        self._refused = False  # somebody was, because it would have taken too long
        self._due = 0.0

    def refused_for_time(self) -> None:
        """Note that a request was refused because too much waits: fuller than full, whatever the backlog's bounds say."""
        self._refused = True

    def on(self, now: float) -> bool:
        """Whether there is pressure."""
        return self._pressure.at(now)

    def take(self, now: float) -> list[tuple[Worker, Request]]:
        """Take out of the backlog what goes to overflow workers now."""
        if not self.configured:
            return []
        fullness = self._fullness()
        self._refused = False
        if not self._pressure.update(fullness, now) or fullness < LOW or now < self._due:
            return []
        workers = sorted((w for w in self._fleet.overflow if w.has_room), key=lambda w: (w.rows, w.slot))
        if not workers:
            return []
        self._due = now + _EVERY_S
        backlog = self._ledger.backlog
        looked_at = list(islice(backlog.least_important(), _MOST_LOOKED_AT))
        taken: list[tuple[Worker, Request]] = []
        for worker in workers:
            rows = worker.rows
            for request in looked_at:
                if rows >= worker.room:
                    break
                if request.deadline > now + worker.batch_s:
                    backlog.remove(request)
                    request.flags &= ~WorkFlag.URGENT
                    taken.append((worker, request))
                    rows += request.rows or 1
            gone = {id(request) for _, request in taken}
            looked_at = [request for request in looked_at if id(request) not in gone]
        self.sent += len(taken)
        return taken

    def _fullness(self) -> float:
        """How full the fullest of all is; 1: at its bound."""
        if self._refused:
            return 1.0
        ledger, forecast = self._ledger, self._forecast
        full = max(self.memory, ledger.bounds.fullness(len(ledger.suspects)))
        if self.target_delay_s and forecast.rows_per_s:
            full = max(full, ledger.backlog.rows / forecast.rows_per_s / self.target_delay_s)
        return full
