"""What board, reports and cards say of the workers' memory, brought to whom it concerns: the leak watch, and the router for its overflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpupool.board import SlotRecord

from . import events as ev
from .device_memory import in_use
from .leak import LeakPolicy
from .leak_watch import LeakWatch, memory_held
from .pool import Pool

Known = Mapping[str, Any]


class MemoryWatch:
    """The watch over all workers of a pool.

    Args:
        pool: whose workers.
        policy: what is called a leak.
        feed: takes the pool's events.
        report: what a slot's present worker last told of itself.
        card: what is known of a slot's card.
        tell_router: sends it a message; whether that went well.
    """

    def __init__(
        self,
        pool: Pool,
        policy: LeakPolicy,
        *,
        feed: Callable[[ev.Event], None],
        report: Callable[[int], Known],
        card: Callable[[int], Known],
        tell_router: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._pool, self._feed, self._report, self._card, self._tell_router = pool, feed, report, card, tell_router
        self._leaks = LeakWatch(policy)
        self._has_overflow = len(pool.counted) < len(pool.slots)
        self._told: tuple[int, float] = (0, 0.0)  # which router, and what

    def tick(self, records: Sequence[SlotRecord], now: float) -> None:
        """Look, if it is time to."""
        if self._has_overflow:
            self._tell_in_use()
        if self._leaks.is_due(now):
            for slot, record in zip(self._pool.slots, records, strict=True):
                if slot.works and record.incarnation == slot.incarnation:
                    held = memory_held(record, self._report(slot.number))
                    for event in self._leaks.observe(slot.number, slot.incarnation, held, record.samples, now):
                        self._feed(event)

    def set_policy(self, policy: LeakPolicy) -> None:
        """Judge by other rules from now on."""
        for event in self._leaks.set_policy(policy):
            self._feed(event)

    def leaks(self) -> dict[int, dict[str, Any]]:
        """What the status document shows, by slot."""
        return {s.number: self._leaks.view(s.number, s.incarnation) for s in self._pool.slots if s.alive}

    def _tell_in_use(self) -> None:
        """Tell the router how full the fullest device is: it does not see that itself."""
        shares = [in_use(self._report(s.number).get("memory", {}), self._card(s.number)) for s in self._pool.counted]
        told = (self._pool.router.epoch, round(max(shares), 2))
        if self._pool.router.up and told != self._told and self._tell_router({"t": "pressure", "memory": told[1]}):
            self._told = told
