"""Which XIDs were seen when: one fault told twice counts once, and repetition makes the same fault weigh more."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from .xid import Action, Context, Decision, decide

#: The kernel log and NVML tell of the same fault, and the kernel in many lines: within this time it is one fault.
SAME_S: Final = 5.0
HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S
#: The clean-up that follows a fault is no fault of its own.
_CLEAN_UP: Final = 45
#: Times kept per card and XID: no rule asks for more.
_KEPT: Final = 16


class XidLog:
    """All XIDs of all cards of this run. Times are monotonic."""

    def __init__(self) -> None:
        #: Distinct faults by (uuid, xid), for the metrics.
        self.totals: Counter[tuple[str, int]] = Counter()
        self._times: dict[tuple[str, int], deque[float]] = {}
        self._acted: dict[tuple[str, int], tuple[float, Action]] = {}
        self._last_fault: dict[str, float] = {}

    def judge(
        self, uuid: str, xid: int, now: float, *, ours: bool | None, killed_at: float | None, others: set[str], text: str
    ) -> Decision | None:
        """Judge one report; None if it tells again what was already acted upon.

        A second report that calls for more than the first did is no repetition: the line that says "fatal" comes after others.

        Args:
            uuid: the device as reported.
            xid: the number.
            now: when it arrived.
            ours: see Context.
            killed_at: when we last killed a process there.
            others: healthy other cards, to compare with.
            text: the kernel's line.
        """
        key = (uuid, xid)
        times = self._times.setdefault(key, deque(maxlen=_KEPT))
        first_at, acted = self._acted.get(key, (float("-inf"), Action.IGNORE))
        repeated = now < first_at + SAME_S
        earlier = list(times)[:-1] if repeated else list(times)
        fault_at = self._last_fault.get(uuid)
        decision = decide(
            xid,
            Context(
                ours=ours,
                since_kill_s=None if killed_at is None else now - killed_at,
                since_other_xid_s=None if fault_at is None else now - fault_at,
                count_1h=1 + sum(at > now - HOUR_S for at in earlier),
                count_24h=1 + sum(at > now - DAY_S for at in earlier),
                others_clean=bool(others) and not any(self._seen(other, xid, now - DAY_S) for other in others),
                text=text,
            ),
        )
        if xid != _CLEAN_UP:
            self._last_fault[uuid] = now
        if repeated:
            if decision.action <= acted:
                return None
            self._acted[key] = (first_at, decision.action)
            return decision
        times.append(now)
        self.totals[key] += 1
        self._acted[key] = (now, decision.action)
        return decision

    def _seen(self, uuid: str, xid: int, since: float) -> bool:
        return any(at > since for at in self._times.get((uuid, xid), ()))
