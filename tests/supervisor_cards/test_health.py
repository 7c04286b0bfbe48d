"""Card health: facts in, verdicts out, in virtual seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.supervisor.cards.card import Health, Standing
from gpupool.supervisor.cards.health import CardHealth
from gpupool.supervisor.cards.reading import CardReading
from gpupool.supervisor.cards.verdicts import (
    CardVerdict,
    LeaveAlone,
    Lose,
    Note,
    Quarantine,
    Readmit,
    RestartWorker,
    SetCardFactor,
)
from gpupool.supervisor.cards.xid import Needs
from gpupool.supervisor.kept import KeptCard

A, B, C = "GPU-a", "GPU-b", "GPU-c"


class Host:
    """Cards that are read once a second, and what health makes of them."""

    def __init__(
        self, *devices: str, now: float = 1000.0, kept: dict[str, KeptCard] | None = None, boot: str = "boot-1"
    ) -> None:
        self.now = now
        self.health = CardHealth(devices or (A, B, C), boot_id=boot, wall_offset_s=1e9, now=now)
        self.readings = {uuid: good(uuid) for uuid in self.health.cards}
        self.said: list[CardVerdict] = list(self.health.restore(kept or {}, now))

    def run(self, seconds: int) -> list[CardVerdict]:
        """Let time pass with readings; verdicts of this time without notes."""
        said: list[CardVerdict] = []
        for _ in range(seconds):
            self.now += 1.0
            said += self.health.readings(list(self.readings.values()), self.now) + self.health.tick(self.now)
        self.said += said
        return acts(said)

    def silent(self, seconds: int) -> list[CardVerdict]:
        said: list[CardVerdict] = []
        for _ in range(seconds):
            self.now += 1.0
            said += self.health.tick(self.now)
        self.said += said
        return acts(said)

    def set(self, uuid: str, **values: Any) -> None:
        self.readings[uuid] = replace(self.readings[uuid], **values)

    def lose(self, uuid: str) -> None:
        self.readings[uuid] = CardReading(uuid, uuid, lost=True, error="GPU is lost", error_code=15)

    def xid(self, uuid: str, xid: int, source: str = "nvml", **more: Any) -> list[CardVerdict]:
        said = self.health.xid(uuid, xid, source, self.now, **more)
        self.said += said
        return acts(said)

    def of(self, uuid: str) -> Health:
        return self.health.cards[uuid].health(self.now)


def good(uuid: str, card: str = "") -> CardReading:
    return CardReading(
        uuid, card or uuid, temperature_c=40, clocks_reasons=0, ecc_uncorrected=0, remapped_pending=False, remapped_failure=False,
        recovery_action=0,
    )  # fmt: skip


def acts(verdicts: list[CardVerdict]) -> list[CardVerdict]:
    return [v for v in verdicts if not isinstance(v, Note)]


def kinds(verdicts: list[CardVerdict]) -> list[tuple[type, str | None]]:
    return [(type(v), v.uuid) for v in verdicts]


# Unknown.


def test_health_is_unknown_until_the_first_reading_and_nothing_follows_from_it() -> None:
    host = Host()
    assert host.of(A) == Health.UNKNOWN
    assert host.health.start_refusal(A, host.now) is None
    assert host.run(1) == []
    assert host.of(A) == Health.OK


def test_silence_makes_health_unknown_and_never_ends_a_worker() -> None:
    host = Host()
    host.run(3)
    assert host.silent(5) == []
    assert host.of(A) == Health.OK
    assert host.silent(1) == []
    assert host.of(A) == Health.UNKNOWN
    assert host.silent(1000) == []
    assert [n.text for n in host.said if isinstance(n, Note) and "no news" in n.text] == [
        "no news of the cards for 5 s: their health is unknown"
    ]
    assert host.run(1) == []
    assert host.of(A) == Health.OK


def test_the_supervisors_own_pause_is_not_the_probes_silence() -> None:
    host = Host()
    host.run(3)
    host.now += 100.0
    assert host.health.tick(host.now, late_s=100.0) == []
    assert host.silent(5) == []
    assert not [n for n in host.said if isinstance(n, Note)]


def test_a_card_that_answers_nothing_is_unknown_and_the_others_are_not() -> None:
    host = Host()
    host.run(1)
    host.readings[A] = CardReading(A, A, error="Unknown Error", error_code=999)
    assert host.run(100) == []
    assert (host.of(A), host.of(B)) == (Health.UNKNOWN, Health.OK)


def test_no_process_is_started_on_a_card_unread_for_a_minute() -> None:
    host = Host()
    host.run(1)
    host.silent(60)
    assert host.health.start_refusal(A, host.now) is None
    host.silent(1)
    assert "not been read for 61 s" in (host.health.start_refusal(A, host.now) or "")


def test_without_nvml_there_is_one_warning_and_starts_go_on() -> None:
    host = Host()
    said = host.health.no_nvml("NVML: library not found", 12)
    assert [(type(v), v.level) for v in said if isinstance(v, Note)] == [(Note, "warning")]
    host.silent(1000)
    assert host.health.start_refusal(A, host.now) is None


def test_a_driver_mismatch_refuses_new_processes_until_the_driver_answers() -> None:
    host = Host()
    host.run(1)
    host.health.no_nvml("Driver/library version mismatch", 18)
    assert "versions differ" in (host.health.start_refusal(A, host.now) or "")
    assert host.of(A) == Health.OK  # as last read: its process works on
    assert host.run(1) == []
    assert host.health.start_refusal(A, host.now) is None


# Lost.


def test_a_lost_card_is_lost_at_once_and_alone() -> None:
    host = Host()
    host.run(1)
    host.lose(B)
    assert kinds(host.run(1)) == [(Lose, B)]
    assert (host.of(A), host.of(B)) == (Health.OK, Health.LOST)
    assert host.run(60) == []


def test_a_lost_card_is_readmitted_when_it_has_answered_cleanly_for_ten_seconds() -> None:
    host = Host()
    host.lose(B)
    host.run(60)
    host.readings[B] = good(B)
    assert host.run(10) == []
    assert host.of(B) == Health.LOST
    assert kinds(host.run(1)) == [(Readmit, B)]
    assert host.of(B) == Health.OK
    assert host.run(100) == []


def test_a_driver_without_recovery_action_readmits_too() -> None:
    host = Host()
    host.lose(B)
    host.run(5)
    host.readings[B] = replace(good(B), recovery_action=None)
    assert kinds(host.run(11)) == [(Readmit, B)]


def test_a_card_that_comes_and_goes_is_not_readmitted() -> None:
    host = Host()
    for _ in range(20):
        host.lose(B)
        host.run(2)
        host.readings[B] = good(B)
        host.run(9)
    assert [k for k in kinds(acts(host.said)) if k[1] == B] == [(Lose, B)]


def test_a_silent_time_does_not_count_as_answering() -> None:
    host = Host()
    host.lose(B)
    host.run(1)
    host.readings[B] = good(B)
    host.run(5)
    host.readings[B] = CardReading(B, B, error="Unknown Error", error_code=999)
    host.run(10)
    host.readings[B] = good(B)
    assert host.run(10) == []


def test_queries_that_succeed_after_xid_79_do_not_bring_a_card_back() -> None:
    host = Host()
    host.run(1)
    assert host.xid(A, 79) == [Lose(A, "XID 79: the card has fallen off the bus [nvml]", Needs.POWER_CYCLE)]
    assert host.run(1000) == []
    host.lose(A)
    assert host.run(30) == []
    host.readings[A] = good(A)
    assert kinds(host.run(11)) == [(Readmit, A)]


# Quarantine.


def test_the_recovery_action_quarantines_and_its_end_is_the_reset_that_clears() -> None:
    host = Host()
    host.set(A, recovery_action=1)
    assert host.run(1) == [Quarantine(A, "the driver asks for a reset of the card", Needs.RESET)]
    assert host.of(A) == Health.BAD
    assert host.run(100) == []
    host.set(A, recovery_action=0)
    assert host.run(10) == []
    assert kinds(host.run(1)) == [(Readmit, A)]


def test_an_xid_that_needs_a_reset_is_not_cleared_by_time_or_by_succeeding_queries() -> None:
    host = Host()
    host.run(1)
    assert kinds(host.xid(A, 48)) == [(Quarantine, A)]
    assert host.run(100_000) == []
    assert "needs reset" in (host.health.start_refusal(A, host.now) or "")


def test_an_xid_and_then_a_reset_seen_in_the_recovery_action_clears() -> None:
    host = Host()
    host.run(1)
    host.xid(A, 48)
    host.set(A, recovery_action=1)
    assert host.run(5) == []
    host.set(A, recovery_action=0)
    assert kinds(host.run(11)) == [(Readmit, A)]


def test_a_field_that_vanishes_is_not_a_reset() -> None:
    host = Host()
    host.set(A, recovery_action=1)
    host.run(1)
    host.set(A, recovery_action=None)
    assert host.run(100) == []


def test_what_needs_a_replacement_waits_for_the_operator_even_after_a_reset() -> None:
    host = Host()
    host.run(1)
    host.xid(A, 48)
    assert host.xid(A, 64) == [Quarantine(A, "XID 64: a memory row could not be remapped [nvml]", Needs.REPLACEMENT)]
    host.set(A, recovery_action=1)
    host.run(5)
    host.set(A, recovery_action=0)
    assert host.run(100) == []
    assert host.health.clear(A) == [Readmit(A, "cleared by an operator")]
    assert host.of(A) == Health.OK


def test_a_reboot_that_is_asked_for_makes_a_quarantined_card_lost_and_not_the_reverse() -> None:
    host = Host()
    host.set(A, recovery_action=1)
    host.run(1)
    host.set(A, recovery_action=2)
    assert host.run(1) == [Lose(A, "the driver asks for a reboot of the host", Needs.NODE_REBOOT)]
    host.set(A, recovery_action=1)
    assert host.run(10) == []
    assert host.of(A) == Health.LOST


def test_a_lost_card_that_comes_back_asking_for_something_is_not_used() -> None:
    host = Host()
    host.lose(A)
    host.run(1)
    host.readings[A] = good(A)
    host.run(9)
    host.set(A, recovery_action=3)
    assert host.run(100) == []
    host.set(A, recovery_action=0)
    assert host.run(10) == []
    assert kinds(host.run(1)) == [(Readmit, A)]


def test_an_earlier_reset_does_not_end_a_later_judgement() -> None:
    host = Host()
    host.set(A, recovery_action=1)
    host.run(1)
    host.set(A, recovery_action=0)
    assert kinds(host.run(11)) == [(Readmit, A)]
    host.xid(A, 48)
    assert host.run(1000) == []


def test_a_fault_after_an_operators_clearance_is_judged_by_itself() -> None:
    host = Host()
    host.run(1)
    host.xid(A, 64)
    host.health.clear(A)
    assert host.xid(A, 48) == [
        Quarantine(A, "XID 48: uncorrectable memory error: results of the last batch may be wrong [nvml]", Needs.RESET)
    ]


def test_a_worse_fault_during_the_return_begins_anew() -> None:
    host = Host()
    host.set(A, recovery_action=1)
    host.run(1)
    host.set(A, recovery_action=0)
    host.run(9)
    assert kinds(host.xid(A, 151)) == [(Lose, A)]
    assert host.run(1000) == []


def test_a_card_due_for_replacement_that_was_lost_in_between_still_waits_for_the_operator() -> None:
    host = Host()
    host.run(1)
    host.xid(A, 64)
    host.lose(A)
    assert host.run(1) == [Lose(A, "the card does not answer: GPU is lost", Needs.REPLACEMENT)]
    host.readings[A] = good(A)
    assert host.run(1000) == []


def test_an_operator_cannot_clear_what_the_next_reading_would_judge_again() -> None:
    host = Host()
    host.set(A, recovery_action=1)
    host.lose(B)
    host.readings[C] = CardReading(C, C, error="GPU requires reset", error_code=16)
    host.run(1)
    for uuid in (A, B, C):
        assert host.health.cards[uuid].clear_refusal()
        assert host.health.clear(uuid) == []


def test_a_failed_remapping_condemns_once_and_an_operator_may_overrule_it() -> None:
    host = Host()
    host.set(A, remapped_failure=True)
    assert [type(v) for v in host.run(1)] == [Quarantine]
    host.health.clear(A)
    assert host.run(100) == []
    assert host.of(A) == Health.OK


def test_a_card_that_refuses_calls_until_reset_is_quarantined_and_comes_back() -> None:
    host = Host()
    host.readings[A] = CardReading(A, A, error="GPU requires reset", error_code=16)
    assert kinds(host.run(20)) == [(Quarantine, A)]
    host.readings[A] = replace(good(A), recovery_action=None)  # also with a driver that does not know the field
    assert kinds(host.run(11)) == [(Readmit, A)]


# Workers.


def test_a_fault_of_the_process_replaces_it_and_the_card_stays_ok() -> None:
    host = Host()
    host.run(1)
    assert host.xid(A, 31, text="Xid 31", ours=True) == [RestartWorker(A, "XID 31: a kernel of the process failed [nvml]", 31)]
    assert host.of(A) == Health.OK
    host.run(10)
    assert host.xid(A, 31, ours=False) == []


def test_the_same_xid_from_both_sources_replaces_the_process_once() -> None:
    host = Host()
    host.run(1)
    assert len(host.xid(A, 94, "kernel")) == 1
    host.run(2)
    assert host.xid(A, 94, "nvml") == []
    assert host.health.xids.totals == {(A, 94): 1}


def test_the_drivers_clean_up_after_our_kill_replaces_nothing() -> None:
    host = Host()
    host.run(1)
    host.health.worker_killed(A, host.now)
    host.run(20)
    assert host.xid(A, 45) == []
    host.run(30)
    assert kinds(host.xid(A, 45)) == [(RestartWorker, A)]


def test_a_death_soon_after_an_unknown_xid_condemns_the_card() -> None:
    host = Host()
    host.run(1)
    assert host.xid(A, 777) == []
    host.run(59)
    assert kinds(host.health.worker_died(A, host.now)) == [(Quarantine, A)]
    assert host.xid(B, 777) == []
    host.run(61)
    assert host.health.worker_died(B, host.now) == []


def test_nothing_is_restarted_on_a_quarantined_card() -> None:
    host = Host()
    host.run(1)
    host.xid(A, 95)
    assert host.xid(A, 94) == []


def test_an_xid_of_a_card_that_is_not_ours_is_nothing() -> None:
    assert Host().xid("GPU-z", 79) == []


def test_a_card_whose_own_processor_is_silent_is_left_alone() -> None:
    host = Host()
    host.run(1)
    assert kinds(host.xid(A, 119)) == [(Quarantine, A), (LeaveAlone, A)]
    assert host.health.left_alone(host.now + 20) == {A: 40.0}
    assert host.health.left_alone(host.now + 60) == {}


def test_the_card_on_which_the_driver_hangs_is_left_alone_and_stays_unknown() -> None:
    host = Host()
    host.run(1)
    assert kinds(acts(host.health.stuck(A, "nvmlDeviceGetPowerUsage", host.now))) == [(LeaveAlone, A)]
    assert acts(host.health.stuck(None, "nvmlInit", host.now)) == []
    assert host.health.cards[A].standing == Standing.SERVING


# Several devices on one card.


def test_a_reset_concerns_all_instances_of_a_card_and_a_fault_of_a_process_its_own() -> None:
    host = Host("MIG-1", "MIG-2", "GPU-x")
    host.readings["MIG-1"], host.readings["MIG-2"] = good("MIG-1", "GPU-m"), good("MIG-2", "GPU-m")
    host.run(1)
    assert kinds(host.xid("MIG-2", 94)) == [(RestartWorker, "MIG-2")]
    assert kinds(host.xid("GPU-m", 94)) == [(RestartWorker, "MIG-1"), (RestartWorker, "MIG-2")]
    assert kinds(host.xid("MIG-1", 95)) == [(Quarantine, "MIG-1"), (Quarantine, "MIG-2")]
    assert host.of("GPU-x") == Health.OK


# Degraded.


def test_a_hot_card_gets_less_work_and_then_more_again() -> None:
    host = Host()
    host.set(A, clocks_reasons=0x44)
    assert host.run(32) == [SetCardFactor(A, 0.5, "hardware thermal slowdown")]
    assert host.of(A) == Health.DEGRADED
    assert host.health.cards[A].explanation()[0] == "hardware thermal slowdown: work is limited to 50%"
    host.set(A, clocks_reasons=0x4)
    assert [v.factor for v in host.run(300) if isinstance(v, SetCardFactor)] == [0.75, 1.0]
    assert host.of(A) == Health.OK


def test_a_pending_remapping_is_shown_with_what_it_needs_and_stops_nothing() -> None:
    host = Host()
    host.set(A, remapped_pending=True)
    assert host.run(10) == []
    assert host.of(A) == Health.DEGRADED
    assert host.health.cards[A].explanation()[1] == Needs.RESET_WHEN_CONVENIENT
    host.set(A, remapped_pending=False)
    host.run(1)
    assert host.of(A) == Health.OK


def test_a_link_error_degrades_until_an_operator_has_looked() -> None:
    host = Host()
    host.run(1)
    assert host.xid(A, 74) == []
    host.run(1000)
    assert host.of(A) == Health.DEGRADED
    host.health.clear(A)
    assert host.of(A) == Health.OK


def test_peer_traffic_and_imex_recovery_stop_nothing_here() -> None:
    host = Host()
    host.set(A, recovery_action=3)
    host.set(B, recovery_action=5)
    assert host.run(10) == []
    assert host.of(A) == Health.DEGRADED
    assert len([n for n in host.said if isinstance(n, Note) and n.uuid == A]) == 1


# Over a restart of the supervisor.


def test_a_restart_does_not_heal_and_the_end_is_recognised_afterwards() -> None:
    before = Host()
    before.set(A, recovery_action=1)
    before.lose(B)
    before.run(5)
    kept = before.health.kept()
    assert kept == before.health.kept()
    assert (kept[A].state, kept[A].boot_id, kept[A].since) == ("quarantined", "boot-1", 1e9 + 1001.0)

    after = Host(now=50.0, kept=kept)
    assert kinds(acts(after.said)) == [(Quarantine, A), (Lose, B)]
    assert after.health.kept() == kept
    assert after.run(10) == []
    assert kinds(after.run(1)) == [(Readmit, A), (Readmit, B)]
    assert after.health.kept() == {}


def test_an_xid_quarantine_survives_a_restart_in_the_same_boot_and_ends_with_the_boot() -> None:
    before = Host()
    before.run(1)
    before.xid(A, 48)
    kept = before.health.kept()

    again = Host(kept=kept)
    again.run(1000)
    assert again.of(A) == Health.BAD
    rebooted = Host(kept=kept, boot="boot-2")
    assert acts(rebooted.said) == []
    rebooted.run(1)
    assert rebooted.of(A) == Health.OK


def test_what_an_operator_must_clear_outlives_the_boot() -> None:
    kept = {
        A: KeptCard("quarantined", "64", "replacement", 64, "boot-0", 5.0),
        "GPU-gone": KeptCard("lost", "", "", None, "boot-1", 5.0),
    }
    host = Host(kept=kept)
    assert kinds(acts(host.said)) == [(Quarantine, A)]


def test_a_need_from_a_newer_version_waits_for_the_operator() -> None:
    host = Host(kept={A: KeptCard("quarantined", "?", "new_thing", None, "boot-0", 5.0)})
    assert host.health.cards[A].needs == Needs.OPERATOR


# Invariants.

_BITS = st.sampled_from([0, 0x4, 0x20, 0x40, 0x80, None])
_READING = st.builds(
    lambda card, bits, recovery, state, failure: {
        "ok": replace(good(card), clocks_reasons=bits, recovery_action=recovery, remapped_failure=failure),
        "lost": CardReading(card, card, lost=True, error="lost", error_code=15),
        "reset": CardReading(card, card, error="reset", error_code=16),
        "error": CardReading(card, card, error="?", error_code=999),
    }[state],
    st.sampled_from([A, B]), _BITS, st.sampled_from([0, 0, 0, None, 1, 2, 3, 4, 9]), st.sampled_from(["ok", "ok", "lost", "reset", "error"]),
    st.booleans(),
)  # fmt: skip
_STEP = st.one_of(
    st.tuples(st.just("read"), _READING),
    st.tuples(st.just("xid"), st.tuples(st.sampled_from([A, B]), st.integers(1, 180))),
    st.tuples(st.just("died"), st.sampled_from([A, B])),
    st.tuples(st.just("killed"), st.sampled_from([A, B])),
    st.tuples(st.just("stuck"), st.sampled_from([A, B, None])),
    st.tuples(st.just("clear"), st.sampled_from([A, B])),
    st.tuples(st.just("silence"), st.none()),
)


@settings(deadline=None)
@given(st.lists(st.tuples(_STEP, st.sampled_from([0.1, 1.0, 1.0, 12.0, 100.0])), max_size=60))
def test_nothing_but_a_readmission_ends_a_judgement_and_each_is_told(steps: list[tuple[tuple[str, Any], float]]) -> None:
    """Play the pool: what it was told is what health says; a device out of use is never ok, and no process starts there."""
    health, now = CardHealth((A, B), boot_id="b", wall_offset_s=0.0, now=0.0), 0.0
    told = {A: Standing.SERVING, B: Standing.SERVING}
    for (kind, what), gap in steps:
        now += gap
        match kind:
            case "read":
                said = health.readings([what], now)
            case "xid":
                said = health.xid(what[0], what[1], "nvml", now)
            case "died":
                said = health.worker_died(what, now)
            case "killed":
                health.worker_killed(what, now)
                said = []
            case "stuck":
                said = health.stuck(what, "call", now)
            case "clear":
                said = health.clear(what)
            case _:
                said = health.tick(now)
                assert acts(said) == []
        for verdict in said:
            match verdict:
                case Quarantine(uuid):
                    assert told[uuid] != Standing.LOST
                    told[uuid] = Standing.QUARANTINED
                case Lose(uuid):
                    told[uuid] = Standing.LOST
                case Readmit(uuid):
                    assert told[uuid] != Standing.SERVING
                    assert kind in ("read", "clear")
                    told[uuid] = Standing.SERVING
                case RestartWorker(uuid):
                    assert told[uuid] == Standing.SERVING
                case SetCardFactor(_, factor):
                    assert 0.25 <= factor <= 1.0
                case _:
                    pass
        for uuid, card in health.cards.items():
            assert card.standing == told[uuid]
            if told[uuid] != Standing.SERVING:
                assert card.health(now) in (Health.BAD, Health.LOST)
                assert health.start_refusal(uuid, now)
                assert card.reason
        kept = health.kept()
        again = CardHealth((A, B), boot_id="b", wall_offset_s=0.0, now=now)
        again.restore(kept, now)
        assert again.kept() == kept
