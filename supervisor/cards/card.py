"""One device as card health remembers it: what it may be used for, why not, and when that ends.

A judgement ends in one of three ways only. A *reset was seen*: the recovery action was not 0 and stays 0 for SETTLE_S. The card *was
seen gone*, or refusing all calls until a reset, and answers again, cleanly, for SETTLE_S. Or the *operator* clears it. That queries succeed says nothing: they succeed on a
card that needs a reset, too. What needs an operator or a replacement waits for the operator in any case. (A new boot is the fourth way,
see CardHealth.restore.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from .reading import RESET_REQUIRED, CardReading
from .throttle import Throttle
from .xid import Action, Needs, decide_recovery

#: A card that came back must answer cleanly for so long before it is used again.
SETTLE_S: Final = 10.0
#: Without a reading for so long, its health is unknown.
STALE_S: Final = 5.0
#: These are cleared by an operator only.
BY_OPERATOR: Final = frozenset({Needs.OPERATOR, Needs.REPLACEMENT})
#: Of two needs the later one stands.
_RANK: Final = (
    Needs.NOTHING, Needs.RESET_WHEN_CONVENIENT, Needs.DRIVER_RELOAD, Needs.RESET, Needs.NODE_REBOOT, Needs.POWER_CYCLE,
    Needs.OPERATOR, Needs.REPLACEMENT,
)  # fmt: skip


class Health(StrEnum):
    """The words of the status document. `unknown` is the absence of news and never ends a worker."""

    OK = "ok"
    DEGRADED = "degraded"
    BAD = "bad"
    LOST = "lost"
    UNKNOWN = "unknown"


class Standing(StrEnum):
    """Whether a device may be used."""

    SERVING = "serving"
    QUARANTINED = "quarantined"
    LOST = "lost"


@dataclass(slots=True)
class Card:
    """One device of the pool: a card, or a MIG instance of one."""

    uuid: str
    card: str = ""  # the card it lives on, as far as known
    standing: Standing = Standing.SERVING
    reason: str = ""
    needs: Needs = Needs.NOTHING
    xid: int | None = None
    since: float = 0.0
    degraded: dict[str, str] = field(default_factory=dict)  # cause to text
    reading: CardReading | None = None
    read_at: float | None = None
    throttle: Throttle = field(default_factory=Throttle)
    killed_at: float | None = None
    failure_judged: bool = False  # its failed row remapping led to a judgement already
    recovery_asked: bool = False  # the driver asked for a recovery since this judgement began
    gone: bool = False  # it was seen not to answer, or to refuse all calls, since this judgement began
    clean_since: float | None = None

    def health(self, now: float) -> Health:
        """Its health in one word."""
        if self.standing == Standing.LOST:
            return Health.LOST
        if self.standing == Standing.QUARANTINED:
            return Health.BAD
        if self.read_at is None or now > self.read_at + STALE_S or (self.reading and self.reading.error):
            return Health.UNKNOWN
        return Health.DEGRADED if self.degraded or self.throttle.factor < 1 else Health.OK

    def explanation(self) -> tuple[str, Needs]:
        """Why it is not simply ok, and what it needs."""
        if self.standing != Standing.SERVING:
            return self.reason, self.needs
        texts = list(self.degraded.values())
        if self.throttle.factor < 1:
            texts.append(f"{self.throttle.reason}: work is limited to {self.throttle.factor:.0%}")
        if self.reading and self.reading.error:
            texts.append(self.reading.error)
        pending = self.reading is not None and self.reading.remapped_pending
        return "; ".join(texts), Needs.RESET_WHEN_CONVENIENT if pending else Needs.NOTHING

    def clear_refusal(self) -> str | None:
        """Say why an operator cannot clear it now, if so: the next reading would judge it again."""
        if self.reading is None:
            return None
        if self.reading.lost:
            return f"the card does not answer: {self.reading.error}"
        if self.reading.error_code == RESET_REQUIRED:
            return f"the driver refuses the card: {self.reading.error}"
        advice = decide_recovery(self.reading.recovery_action)
        return advice.text if advice and advice.action >= Action.QUARANTINE else None

    def mark(self, cause: str, text: str, *, on: bool) -> None:
        """Note a reason for which it is degraded, or that it is over."""
        if on:
            self.degraded[cause] = text
        else:
            self.degraded.pop(cause, None)

    def judge(self, standing: Standing, reason: str, needs: Needs, now: float, xid: int | None = None) -> bool:
        """Take it out of use, or note that it needs more than was known; False if that says nothing new."""
        milder = self.standing == Standing.LOST and standing != Standing.LOST
        if self.standing == standing or milder:
            if _RANK.index(needs) <= _RANK.index(self.needs):
                return False
        elif self.standing == Standing.SERVING:
            self.since = now
        self.standing = self.standing if milder else standing
        self.reason, self.xid = reason, xid
        self.needs = max(self.needs, needs, key=_RANK.index)
        # What was seen before is no end of what begins now.
        self.recovery_asked, self.gone, self.clean_since = False, False, None
        return True

    def release(self) -> None:
        """Put it back into use."""
        self.standing, self.reason, self.needs, self.xid = Standing.SERVING, "", Needs.NOTHING, None
        self.recovery_asked, self.gone, self.clean_since = False, False, None

    def not_clean(self) -> None:
        """Note a reading that shows trouble, or nothing."""
        self.clean_since = None

    def clean(self, now: float) -> str | None:
        """Note a reading without trouble; why the judgement ends, if it does."""
        if self.standing == Standing.SERVING:
            return None
        self.clean_since = now if self.clean_since is None else self.clean_since
        if now < self.clean_since + SETTLE_S or self.needs in BY_OPERATOR:
            return None
        if self.recovery_asked and self.reading and self.reading.recovery_action == 0:
            return "it was reset: the driver asks for no recovery any more"
        if self.gone:
            return f"it is back and has answered for {SETTLE_S:g} s"
        return None
