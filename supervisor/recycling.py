"""Processes that are renewed by themselves, because they leak, ask for it or have run for long enough: one at a time, while everything else is well.

Workers that reach a limit together must not leave together. So each waits for its turn: no other worker is missing, the pool keeps
`min_ready` without it, and the one before has been ready again for a while. Each finishes what it was given; should another worker drop
out meanwhile, it is left at work.
"""

from __future__ import annotations

from typing import Final

from .lifecycle import Change, State
from .slot import Purpose, Slot
from .workers import Workers

#: From one's being ready again to the next one's turn: what its first batches show should be seen before the next one goes.
PAUSE_S: Final = 5.0
#: A process that still wants to be renewed asks every ten seconds; a wish that is older has passed.
ASKED_S: Final = 60.0


class Recycling:
    """The renewal that is under way, if one is, and whose turn comes after it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._counted = [s for s in workers.slots if not s.overflow]
        self._slot: Slot | None = None
        self._incarnation = 0
        self._rest_until = 0.0

    def tick(self, now: float) -> None:
        """Begin the next renewal, or call off the one that has begun, as the others' state asks for."""
        slot = self._slot
        if slot is None:
            self._begin_next(now)
        elif self._over(slot):
            self._slot, self._rest_until = None, now + PAUSE_S
        elif slot.state == State.DRAINING and not slot.held and any(not s.works for s in self._counted if s is not slot):
            slot.purpose, slot.reason, slot.drain_ends_at = Purpose.NONE, "", None
            slot.change(Change.RELEASE, now)
            self._slot, self._rest_until = None, now + PAUSE_S
            self._workers.report("worker_recycle_called_off", slot, reason="another worker has dropped out")

    def _begin_next(self, now: float) -> None:
        if now < self._rest_until or not all(s.works for s in self._counted):
            return
        spare = len(self._counted) > self._workers.policy.min_ready
        waiting = [
            s for s in self._workers.slots if s.works and (spare or s.overflow or self._asks(s, now)) and self.why(s, now)
        ]
        if waiting:
            self._slot = slot = min(waiting, key=lambda s: (s.ready_at or 0.0, s.number))
            self._incarnation = slot.incarnation
            self._workers.report("worker_recycled", slot, reason=self.why(slot, now))
            self._workers.finish_first(slot, Purpose.RECYCLE, self.why(slot, now), now)

    def _asks(self, slot: Slot, now: float) -> bool:
        """Whether its process has asked for it, also where it is the only one, and served long enough to have lost memory over time."""
        stable_after_s = self._workers.policy.restart.stable_after_s
        meant = bool(slot.renewal) and now <= slot.renewal_asked_at + ASKED_S
        return meant and slot.ready_at is not None and now >= slot.ready_at + stable_after_s

    def why(self, slot: Slot, now: float) -> str:
        """Say why a slot's process is to be renewed; "" if it is not."""
        policy = self._workers.policy
        if self._asks(slot, now):
            return slot.renewal
        if policy.recycle_on_leak and slot.leaks:
            return f"its {' and '.join(sorted(slot.leaks))} memory is suspected of a leak"
        if 0 < policy.recycle_after_batches <= slot.batches:
            return f"it has run {slot.batches} batches"
        return ""

    def _over(self, slot: Slot) -> bool:
        """Whether its new process serves, or there will be none for now."""
        if slot.incarnation > self._incarnation:
            return slot.joined or not slot.coming
        return slot.purpose != Purpose.RECYCLE or not (slot.alive or slot.state == State.BACKING_OFF)
