"""What counts as the same fault, and what as one more."""

from __future__ import annotations

from gpupool.supervisor.cards.xid import Action, Decision
from gpupool.supervisor.cards.xid_log import XidLog


def judge(
    log: XidLog,
    xid: int,
    now: float,
    uuid: str = "A",
    *,
    killed_at: float | None = None,
    others: set[str] | None = None,
    text: str = "",
) -> Decision | None:
    return log.judge(uuid, xid, now, ours=None, killed_at=killed_at, others=others or set(), text=text)


def action(decision: Decision | None) -> Action | None:
    return decision.action if decision else None


def test_the_same_fault_from_two_sources_counts_once() -> None:
    log = XidLog()
    assert judge(log, 94, 100.0)
    assert judge(log, 94, 104.9) is None
    assert log.totals == {("A", 94): 1}
    assert judge(log, 94, 105.0)
    assert log.totals == {("A", 94): 2}


def test_another_card_or_another_number_is_another_fault() -> None:
    log = XidLog()
    assert judge(log, 94, 100.0)
    assert judge(log, 94, 100.0, "B")
    assert judge(log, 48, 100.0)


def test_a_line_that_makes_it_worse_is_no_repetition() -> None:
    log = XidLog()
    assert action(judge(log, 149, 100.0, text="149, Nonfatal")) == Action.DEGRADE
    assert action(judge(log, 149, 100.1, text="149, Fatal")) == Action.QUARANTINE
    assert judge(log, 149, 100.2, text="149, Fatal") is None
    assert log.totals == {("A", 149): 1}


def test_a_burst_of_lines_for_one_fault_does_not_add_up_to_three() -> None:
    log = XidLog()
    for n in range(40):
        judge(log, 94, 100.0 + n * 0.1)
    assert log.totals == {("A", 94): 1}


def test_the_second_line_of_one_timeout_is_not_the_second_timeout() -> None:
    log = XidLog()
    assert action(judge(log, 109, 100.0)) == Action.RESTART_WORKER
    assert judge(log, 109, 100.1) is None
    assert action(judge(log, 109, 200.0)) == Action.QUARANTINE


def test_three_in_a_day_add_up_and_older_ones_do_not() -> None:
    log = XidLog()
    assert action(judge(log, 94, 0.0)) == Action.RESTART_WORKER
    assert action(judge(log, 94, 80000.0)) == Action.RESTART_WORKER
    assert action(judge(log, 94, 90000.0)) == Action.RESTART_WORKER  # the first is older than a day
    assert action(judge(log, 94, 91000.0)) == Action.QUARANTINE


def test_a_clean_up_after_another_fault_is_ignored_and_is_no_fault_itself() -> None:
    log = XidLog()
    judge(log, 31, 100.0)
    assert action(judge(log, 45, 101.0)) == Action.IGNORE
    assert action(judge(log, 45, 131.0)) == Action.RESTART_WORKER
    assert action(judge(log, 45, 137.0)) == Action.RESTART_WORKER


def test_a_clean_up_after_our_own_kill_is_ignored() -> None:
    assert action(judge(XidLog(), 45, 100.0, killed_at=99.0)) == Action.IGNORE


def test_faults_on_the_other_cards_speak_for_the_model_and_against_blaming_a_card() -> None:
    shared, alone = XidLog(), XidLog()
    judge(shared, 31, 50.0, "B")
    for log in (shared, alone):
        for now in (100.0, 200.0):
            judge(log, 31, now, others={"B"})
    assert action(judge(shared, 31, 300.0, others={"B"})) == Action.RESTART_WORKER
    assert action(judge(alone, 31, 300.0, others={"B"})) == Action.QUARANTINE
    assert action(judge(alone, 31, 400.0, others=set())) == Action.RESTART_WORKER  # nobody to compare with
