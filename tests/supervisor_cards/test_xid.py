"""The XID table row by row from a second, hand-written list, its special cases, and the kernel's lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.cards.xid import (
    TABLE,
    Action,
    Context,
    Decision,
    KernelXid,
    Needs,
    bus_name,
    decide,
    decide_recovery,
    parse_kernel_line,
)

CALM = Context()
EXPECTED = {
    Action.RESTART_WORKER: [
        8, 11, 13, 25, 31, 32, 39, 40, 41, 45, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 94, 96, 97, 98, 99,
        100, 101, 102, 103, 104, 105, 109, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 139,
    ],
    Action.LOG: [
        37, 38, 43, 44, 63, 66, 67, 78, 92, 93, 106, 107, 121, 137, 141, 152, 153, 154, 157, 159, 160, 161, 162, 163, 164, 165, 166, 170,
    ],
    Action.DEGRADE: [54, 74, 122, 123, 124, 125, 142, 144, 145, 146, 147, 148, 149, 150, 168],
    Action.QUARANTINE: [46, 48, 62, 64, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158, 167, 169, 171, 172],
    Action.LOST: [79, 151],
}  # fmt: skip


def action(xid: int, context: Context = CALM) -> Action:
    return decide(xid, context).action


@pytest.mark.parametrize("expected", list(EXPECTED), ids=lambda a: a.name)
def test_each_xid_alone_has_its_action(expected: Action) -> None:
    assert sorted(xid for xid in TABLE if action(xid) == expected) == EXPECTED[expected]


@pytest.mark.parametrize(
    ("xid", "needs"),
    [(48, Needs.RESET), (63, Needs.RESET_WHEN_CONVENIENT), (64, Needs.REPLACEMENT), (79, Needs.POWER_CYCLE), (151, Needs.NODE_REBOOT),
     (54, Needs.OPERATOR), (94, Needs.NOTHING)],
)  # fmt: skip
def test_the_operator_is_told_what_the_card_needs(xid: int, needs: Needs) -> None:
    assert decide(xid, CALM).needs == needs


def test_an_unknown_xid_is_logged_only() -> None:
    assert decide(999, CALM) == Decision(Action.LOG, Needs.NOTHING, "XID 999: unknown XID; the card's recovery action decides")


@pytest.mark.parametrize("xid", [8, 13, 31, 69, 100])
def test_what_a_process_did_to_itself_restarts_ours_only(xid: int) -> None:
    assert action(xid, Context(ours=True)) == Action.RESTART_WORKER
    assert action(xid, Context(ours=None)) == Action.RESTART_WORKER
    assert action(xid, Context(ours=False)) == Action.LOG


def test_a_fault_of_the_card_is_one_whosoever_process_met_it() -> None:
    assert action(48, Context(ours=False)) == Action.QUARANTINE


@pytest.mark.parametrize("xid", [39, 85, 63, 94])
def test_the_third_time_in_a_day_is_no_accident(xid: int) -> None:
    assert action(xid, Context(count_24h=2)) < Action.QUARANTINE
    assert decide(xid, Context(count_24h=3)).needs == Needs.RESET
    assert action(xid, Context(count_24h=3)) == Action.QUARANTINE


def test_engine_faults_condemn_a_card_only_if_the_others_run_the_same_without_them() -> None:
    assert action(31, Context(count_24h=9, others_clean=False)) == Action.RESTART_WORKER
    assert action(31, Context(count_24h=2, others_clean=True)) == Action.RESTART_WORKER
    assert action(13, Context(count_24h=3, others_clean=True)) == Action.QUARANTINE
    assert "diagnostics" in decide(13, Context(count_24h=3, others_clean=True)).text


def test_a_clean_up_is_the_echo_of_a_kill_or_of_a_fault_and_a_fault_when_alone() -> None:
    assert action(45, Context(since_kill_s=30.0)) == Action.IGNORE
    assert action(45, Context(since_other_xid_s=0.0)) == Action.IGNORE
    assert action(45, Context(since_kill_s=30.1, since_other_xid_s=31.0)) == Action.RESTART_WORKER


def test_a_second_context_switch_timeout_within_the_hour_needs_a_reset() -> None:
    assert action(109, Context(count_1h=1, count_24h=5)) == Action.RESTART_WORKER
    assert action(109, Context(count_1h=2)) == Action.QUARANTINE


def test_a_silent_card_processor_leaves_the_card_alone_and_advises_the_second_time() -> None:
    assert decide(119, CALM).leave_alone
    assert "driver" in decide(120, Context(count_24h=2)).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("149, NETIR_LINK_EVT  Fatal   XC0", Action.QUARANTINE), ("145, RLW_SRC_TRACK Nonfatal XC1", Action.DEGRADE),
     ("145, Non-Fatal", Action.DEGRADE), ("74, NVLink: something", Action.DEGRADE)],
)  # fmt: skip
def test_a_fatal_link_error_needs_a_reset(text: str, expected: Action) -> None:
    assert action(149, Context(text=text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", Action.QUARANTINE),
     ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", Action.LOST),
     ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", Action.DEGRADE),
     ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", Action.LOG), ("", Action.LOG)],
)  # fmt: skip
def test_a_changed_recovery_action_is_read_from_the_text_if_there_is_one(text: str, expected: Action) -> None:
    assert action(154, Context(text=text)) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, Action.QUARANTINE), (2, Action.LOST), (3, Action.DEGRADE), (4, Action.QUARANTINE), (5, Action.LOG), (6, Action.QUARANTINE),
     (7, Action.LOST), (8, Action.QUARANTINE), (255, Action.QUARANTINE)],
)  # fmt: skip
def test_each_recovery_action_is_understood_and_an_unknown_one_taken_seriously(value: int, expected: Action) -> None:
    decision = decide_recovery(value)
    assert decision is not None
    assert decision.action == expected


def test_no_recovery_action_asks_for_nothing() -> None:
    assert decide_recovery(0) is None
    assert decide_recovery(None) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", ("0000:05:00", 79, None, None)),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", ("0000:03:00", 14, None, None)),
        ("NVRM: Xid (PCI:0000:3B:00.0): 31, pid=1234, name=python3, Ch 8", ("0000:3b:00", 31, 1234, None)),
        ("NVRM: Xid (PCI:0000:07:00 GPU-I:0c): 94, pid='77', name=python", ("0000:07:00", 94, 77, 12)),
        ("NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus.", ("0000:9b:00", 79, None, None)),
        ("NVRM: GPU at PCI:0000:9b:00.0: GPU has fallen off the bus.", ("0000:9b:00", 79, None, None)),
        ("NVRM: The NVIDIA GPU 0000:9b:00.0 (PCI ID: 10de:2335)\\x0ainstalled in this system has fallen off the bus and is",
         ("0000:9b:00", 79, None, None)),
    ],
)  # fmt: skip
def test_the_kernels_lines_are_understood(line: str, expected: tuple[str, int, int | None, int | None]) -> None:
    found = parse_kernel_line(line)
    assert found is not None
    assert (found.bus, found.xid, found.pid, found.instance) == expected


@pytest.mark.parametrize(
    "line",
    ["", "usb 1-1: new device", "NVRM: loading NVIDIA UNIX Module", "NVRM: Xid (PCI:xyz): 79,", "NVRM: Xid (PCI:0000:05): 79,",
     "NVRM: Xid (PCI:0000:05:00): none"],
)  # fmt: skip
def test_other_lines_are_not(line: str) -> None:
    assert parse_kernel_line(line) is None


@given(st.text(), st.text())
def test_no_line_raises(before: str, after: str) -> None:
    for line in (before, f"NVRM: Xid ({before}): {after}", f"{before}NVRM: {after} has fallen off the bus"):
        assert parse_kernel_line(line) is None or isinstance(parse_kernel_line(line), KernelXid)


def test_one_bus_address_has_one_name() -> None:
    assert {bus_name(n) for n in ("00000000:3B:00.0", "PCI:0000:3b:00", "0000:3b:00.0")} == {"0000:3b:00"}
    assert bus_name("00010000:01:00.0") == "10000:01:00"
    assert bus_name("nothing") is None
