"""Card health: from readings, XIDs and silence to what the pool must do about each device. Pure: time comes in, verdicts go out.

Three sources are weighed. The recovery action in the readings is the driver's own word and overrides the rest upwards. An XID says what
happened (see xid). Silence says nothing: a probe that hangs or is gone makes health *unknown*, and unknown never ends a worker.
How a judgement ends is told in card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, assert_never

from gpupool.supervisor.kept import KeptCard

from .card import BY_OPERATOR, STALE_S, Card, Health, Standing
from .reading import CORRUPTED_INFOROM, RESET_REQUIRED, VERSION_MISMATCH, CardReading
from .verdicts import CardVerdict, LeaveAlone, Lose, Note, Quarantine, Readmit, RestartWorker, SetCardFactor
from .xid import TABLE, Action, Decision, Needs, decide_recovery
from .xid_log import XidLog

#: A card that was read before but has not been for so long gets no new process: the driver may hang on it.
BLIND_S: Final = 60.0
#: How long a card is left alone on which the driver's calls hang.
ALONE_S: Final = 60.0
#: An unexpected death so soon after an unknown XID makes the XID a fault of the card.
_SUSPECT_S: Final = 60.0
#: The supervisor's own loop came round so late that the silence it sees is its own.
_PAUSE_S: Final = 1.0


class CardHealth:
    """All devices of the pool that are GPUs.

    Args:
        devices: their ids, as the pool names them.
        boot_id: of this boot.
        wall_offset_s: wall clock less monotonic clock, to tell people when a judgement began.
        now: the start.
    """

    def __init__(self, devices: Iterable[str], *, boot_id: str, wall_offset_s: float, now: float) -> None:
        self.cards = {uuid: Card(uuid, uuid) for uuid in devices}
        self.xids = XidLog()
        self.driver_problem = ""
        self.watching = True  # False while the probe is stopped on purpose: then its silence forbids nothing
        self._boot_id, self._wall_offset_s = boot_id, wall_offset_s
        self._heard_at, self._silent = now, False
        self._alone_until: dict[str, float] = {}
        self._unknown_xid: dict[str, tuple[int, float]] = {}
        self._out: list[CardVerdict] = []

    # What is asked.

    def start_refusal(self, uuid: str, now: float) -> str | None:
        """Say why no process may be started on a device now, if so."""
        card = self.cards[uuid]
        if card.standing != Standing.SERVING:
            return f"{card.standing}: {card.reason}" + (f" (needs {card.needs})" if card.needs else "")
        if self.driver_problem:
            return self.driver_problem
        if self.watching and card.read_at is not None and now > card.read_at + BLIND_S:
            return f"the card has not been read for {now - card.read_at:.0f} s; the driver may hang"
        return None

    def left_alone(self, now: float) -> dict[str, float]:
        """Devices that a new probe must not touch yet, with the seconds to go."""
        return {uuid: until - now for uuid, until in self._alone_until.items() if until > now}

    def kept(self) -> dict[str, KeptCard]:
        """What must survive a restart of the supervisor. Equal as long as nothing changed."""
        return {
            card.uuid: KeptCard(
                card.standing, card.reason, card.needs, card.xid, self._boot_id, round(card.since + self._wall_offset_s, 3),
                card.recovery_asked, card.gone,
            )
            for card in self.cards.values() if card.standing != Standing.SERVING
        }  # fmt: skip

    # What is told. Each returns verdicts, in order.

    def restore(self, kept: Mapping[str, KeptCard], now: float) -> list[CardVerdict]:
        """Take up what the last run knew. A new boot has reset the hardware: only what an operator must clear outlives it."""
        self._out = []
        for uuid, old in kept.items():
            if (card := self.cards.get(uuid)) is None:
                continue
            needs = next((n for n in Needs if n == old.needs), Needs.OPERATOR)
            if old.boot_id and old.boot_id != self._boot_id and needs not in BY_OPERATOR:
                self._note("info", f"{old.state} before this boot, used again: {old.reason}", uuid)
                continue
            card.judge(Standing(old.state), old.reason, needs, now, old.xid)
            card.since = old.since - self._wall_offset_s
            card.recovery_asked, card.gone = old.recovery_asked, old.gone
            self._tell_standing(card)
        return self._out

    def readings(self, cards: Sequence[CardReading], now: float) -> list[CardVerdict]:
        """Take one message of the probe; an empty one is a sign of life."""
        self._out = []
        self._heard_at = now
        if self._silent:
            self._silent = False
            self._note("info", "the probe answers again")
        for reading in cards:
            if card := self.cards.get(reading.uuid):
                self._read(card, reading, now)
        if cards and self.driver_problem:
            self.driver_problem = ""
            self._note("info", "the driver answers")
        return self._out

    def xid(
        self, uuid: str, xid: int, source: str, now: float, *, text: str = "", ours: bool | None = None
    ) -> list[CardVerdict]:
        """Take one XID. `ours`: whether the process that it names is one of ours."""
        self._out = []
        hit = [c for c in self.cards.values() if c.uuid == uuid] or self._on_card(uuid)
        if not hit:
            return self._out
        others = {
            c.card for c in self.cards.values() if c.card != hit[0].card and c.health(now) in (Health.OK, Health.DEGRADED)
        }  # fmt: skip
        killed = [c.killed_at for c in hit if c.killed_at is not None]
        decision = self.xids.judge(uuid, xid, now, ours=ours, killed_at=max(killed, default=None), others=others, text=text)
        if decision is None:
            return self._out
        if xid not in TABLE:
            self._unknown_xid.update({c.uuid: (xid, now) for c in hit})
        for card in hit:
            self._apply(card, decision, now, xid, source)
        return self._out

    def stuck(self, uuid: str | None, call: str, now: float) -> list[CardVerdict]:
        """A driver call of the probe hangs, about this device; the next probe is to go round it."""
        self._out = []
        self._note("error", f"the driver hangs in {call}", uuid)
        if uuid in self.cards:
            self._leave_alone(uuid, f"{call} hangs", now)
        return self._out

    def no_nvml(self, reason: str, code: int | None) -> list[CardVerdict]:
        """The probe has no NVML to ask."""
        self._out = []
        if code == VERSION_MISMATCH:
            # Running processes hold the old library and work on; a new one would fail.
            self.driver_problem = "driver and library versions differ (an upgrade?): reload the driver or reboot"
            self._note("error", f"{self.driver_problem}: {reason}")
        else:
            self._note("warning", f"card health is unknown: {reason}")
        return self._out

    def tick(self, now: float, *, late_s: float = 0.0) -> list[CardVerdict]:
        """Let time pass. `late_s`: the supervisor itself was late, which is not the probe's silence."""
        self._out = []
        if late_s > _PAUSE_S:
            self._heard_at = now
        if not self._silent and now > self._heard_at + STALE_S:
            self._silent = True
            self._note("warning", f"no news of the cards for {STALE_S:g} s: their health is unknown")
        return self._out

    def worker_killed(self, uuid: str, now: float) -> None:
        """We ended the device's process by a signal: the driver will report its clean-up."""
        if card := self.cards.get(uuid):
            card.killed_at = now

    def worker_died(self, uuid: str, now: float) -> list[CardVerdict]:
        """The device's process died unasked."""
        self._out = []
        xid, at = self._unknown_xid.pop(uuid, (0, float("-inf")))
        if now <= at + _SUSPECT_S and (card := self.cards.get(uuid)):
            text = f"its process died {now - at:.0f} s after the unknown XID {xid}"
            self._apply(card, Decision(Action.QUARANTINE, Needs.RESET, text), now, xid)
        return self._out

    def clear(self, uuid: str) -> list[CardVerdict]:
        """An operator puts a device back into use, unless Card.clear_refusal speaks against it."""
        self._out = []
        card = self.cards[uuid]
        if card.clear_refusal() is None:
            card.degraded.pop("xid", None)
            self._alone_until.pop(uuid, None)
            if card.standing != Standing.SERVING:
                self._readmit(card, "cleared by an operator")
        return self._out

    # How it is judged.

    def _read(self, card: Card, reading: CardReading, now: float) -> None:
        before, card.reading = card.reading, reading
        if reading.error and not reading.lost and reading.error_code != RESET_REQUIRED:
            card.not_clean()  # no news
            return
        card.read_at, card.card = now, reading.card or card.uuid
        if reading.lost:
            card.not_clean()
            decision = Decision(Action.LOST, Needs.POWER_CYCLE, f"the card does not answer: {reading.error}")
            self._apply(card, decision, now)
            card.gone = True
            return
        advice = decide_recovery(reading.recovery_action)
        if reading.error_code == RESET_REQUIRED:
            advice = Decision(Action.QUARANTINE, Needs.RESET, f"the driver refuses the card: {reading.error}")
        self._read_memory(card, reading, before)
        if reading.remapped_failure and not card.failure_judged:
            text = "a memory row could not be remapped: the card is due for replacement"
            self._apply(card, Decision(Action.QUARANTINE, Needs.REPLACEMENT, text), now)
        card.failure_judged = bool(reading.remapped_failure)
        if advice is None:
            card.degraded.pop("recovery", None)
            if reason := card.clean(now):
                card.degraded.pop("xid", None)
                self._readmit(card, reason)
        else:
            card.not_clean()
            if advice.action >= Action.QUARANTINE:
                self._apply(card, advice, now)
                card.recovery_asked, card.gone = True, card.gone or reading.error_code == RESET_REQUIRED
            elif "recovery" not in card.degraded:
                card.degraded["recovery"] = advice.text
                self._note("warning", advice.text, card.uuid)
        if reading.clocks_reasons is not None and card.throttle.update(reading.clocks_reasons, now):
            self._out.append(SetCardFactor(card.uuid, card.throttle.factor, card.throttle.reason))

    def _read_memory(self, card: Card, reading: CardReading, before: CardReading | None) -> None:
        card.mark("remap", "a memory row waits for a reset to be remapped", on=bool(reading.remapped_pending))
        card.mark("inforom", "the card's configuration store is corrupted", on=reading.error_code == CORRUPTED_INFOROM)
        if before and (reading.ecc_uncorrected or 0) > (before.ecc_uncorrected or 0) and before.ecc_uncorrected is not None:
            self._note(
                "warning", f"uncorrected memory errors: {reading.ecc_uncorrected} since the driver was loaded", card.uuid
            )

    def _apply(self, card: Card, decision: Decision, now: float, xid: int | None = None, source: str = "") -> None:
        text = decision.text + (f" [{source}]" if source else "")
        match decision.action:
            case Action.IGNORE:
                self._note("debug", text, card.uuid, xid)
            case Action.LOG:
                self._note("warning" if decision.needs or xid not in TABLE else "info", text, card.uuid, xid)
            case Action.DEGRADE:
                card.degraded["xid"] = text
                self._note("warning", text, card.uuid, xid)
            case Action.RESTART_WORKER:
                if card.standing == Standing.SERVING:
                    self._out.append(RestartWorker(card.uuid, text, xid))
            case Action.QUARANTINE | Action.LOST:
                # A reset concerns the whole card, and so all of its instances.
                standing = Standing.LOST if decision.action == Action.LOST else Standing.QUARANTINED
                for each in self._on_card(card.card):
                    if each.judge(standing, text, decision.needs, now, xid):
                        self._tell_standing(each)
            case _:
                assert_never(decision.action)
        if decision.leave_alone:
            self._leave_alone(card.uuid, text, now)

    def _on_card(self, card: str) -> list[Card]:
        return [c for c in self.cards.values() if c.card == card]

    def _tell_standing(self, card: Card) -> None:
        verdict = Lose if card.standing == Standing.LOST else Quarantine
        self._out.append(verdict(card.uuid, card.reason, card.needs))

    def _readmit(self, card: Card, reason: str) -> None:
        card.release()
        self._out.append(Readmit(card.uuid, reason))

    def _leave_alone(self, uuid: str, reason: str, now: float) -> None:
        self._alone_until[uuid] = now + ALONE_S
        self._out.append(LeaveAlone(uuid, ALONE_S, reason))

    def _note(self, level: str, text: str, uuid: str | None = None, xid: int | None = None) -> None:
        self._out.append(Note(level, text, uuid, xid))
