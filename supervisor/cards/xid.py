"""What an XID means for a card and its worker: the driver's error numbers as a table, and the recovery action that overrides it.

An XID is the driver's report of a fault on a card, in the kernel log and (most, not all) through NVML. The table follows the buckets of
NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, the "immediate action"), compared with what the
health checks of Kubernetes' device plugin, DCGM, GKE and EKS act upon. Where they differ, the milder one stands here, because since
driver R570 the card itself says what it needs: the recovery action (NVML field 230) overrides an XID's rule upwards, never downwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Final


class Action(IntEnum):
    """What follows for us; a larger one is more severe."""

    IGNORE = 0
    LOG = 1
    DEGRADE = 2  # the card serves on, marked as degraded
    RESTART_WORKER = 3  # its process holds what is broken, a fresh one does not
    QUARANTINE = 4  # nothing runs there until the card was reset or an operator clears it
    LOST = 5  # the card is gone


class Needs(StrEnum):
    """What somebody must do about a card; empty when nothing. The daemon never resets a card and never reboots a host."""

    NOTHING = ""
    RESET = "reset"
    RESET_WHEN_CONVENIENT = "reset_when_convenient"
    NODE_REBOOT = "node_reboot"
    POWER_CYCLE = "power_cycle"
    DRIVER_RELOAD = "driver_reload"
    OPERATOR = "operator"  # look at it, then `gpupool resume`
    REPLACEMENT = "replacement"


@dataclass(frozen=True, slots=True)
class Context:
    """What else is known when an XID arrives; counts include this one."""

    ours: bool | None = None  # whether the process it names is one of ours; None: it names none
    since_kill_s: float | None = None  # since we last killed a process on this card
    since_other_xid_s: float | None = None  # since another XID on this card
    count_1h: int = 1
    count_24h: int = 1
    others_clean: bool = False  # there are other cards, and none of them saw this XID in 24 h
    text: str = ""  # the kernel's line, if that was the source


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and what to tell the operator."""

    action: Action
    needs: Needs
    text: str
    #: The driver's own calls may hang on this card now: leave it alone for a while.
    leave_alone: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    meaning: str
    action: Action
    needs: Needs = Needs.NOTHING
    #: This often within 24 hours (or one hour, see `_decide_109`) is no accident any more: the card is quarantined.
    limit_24h: int | None = None
    #: Caused by the process that used that engine: nothing to do if that was not ours.
    only_ours: bool = False
    leave_alone: bool = False


#: Clean-up reports within this time of a kill, or of another XID, are its echo.
ECHO_S: Final = 30.0

_APP: Final = Rule("the process put bad work on the card", Action.RESTART_WORKER, only_ours=True)
_FAULT: Final = Rule("a kernel of the process failed", Action.RESTART_WORKER, only_ours=True)
_COPY: Final = Rule("a copy engine failed", Action.RESTART_WORKER, limit_24h=3)
_MEDIA: Final = Rule("a video, JPEG or optical flow engine failed", Action.RESTART_WORKER, only_ours=True)
_NOTICE: Final = Rule("a notice of driver or firmware", Action.LOG)
_RESET: Final = Rule("the card cannot go on without a reset", Action.QUARANTINE, Needs.RESET)
_ECC: Final = Rule("uncorrectable memory error: results of the last batch may be wrong", Action.QUARANTINE, Needs.RESET)
_LINK: Final = Rule("NVLink error", Action.DEGRADE)
_GSP: Final = Rule("the card's own processor (GSP) does not answer", Action.QUARANTINE, Needs.RESET, leave_alone=True)
_CHECK: Final = Rule("the card's flash or firmware store has a problem", Action.DEGRADE, Needs.OPERATOR)
_UNKNOWN: Final = Rule("unknown XID; the card's recovery action decides", Action.LOG)


def _table(*rows: tuple[str, Rule]) -> dict[int, Rule]:
    """Expand "39-41 85" into numbers."""
    found: dict[int, Rule] = {}
    for numbers, rule in rows:
        for part in numbers.split():
            first, _, last = part.partition("-")
            for xid in range(int(first), int(last or first) + 1):
                assert xid not in found, f"XID {xid} stands in the table twice"
                found[xid] = rule
    return found


TABLE: Final[dict[int, Rule]] = _table(
    ("8 11 25 32 69 80", _APP),
    ("13 31", _FAULT),
    ("39-41 70-72 75-77 85 126-135", _COPY),
    ("60 68 82-84 86 88 89 96-105 139", _MEDIA),
    ("37 38 44 66 67 92 93 121 137 141 152 153 160 161", _NOTICE),
    ("43", Rule("a channel was stopped after a fault of its own process", Action.LOG)),
    ("45", Rule("the driver cleaned up after a process", Action.RESTART_WORKER)),
    ("46 62 110 136 143 155 156 158", _RESET),
    ("109", Rule("a context switch timed out", Action.RESTART_WORKER)),
    ("48 95 140 171 172", _ECC),
    ("54", Rule("auxiliary power is missing: check the cables", Action.DEGRADE, Needs.OPERATOR)),
    ("63", Rule("a memory row was remapped", Action.LOG, Needs.RESET_WHEN_CONVENIENT, limit_24h=3)),
    ("64", Rule("a memory row could not be remapped", Action.QUARANTINE, Needs.REPLACEMENT)),
    ("74 144-150", _LINK),
    ("78 106 107", Rule("a notice of virtualisation or of a test", Action.LOG)),
    ("79", Rule("the card has fallen off the bus", Action.LOST, Needs.POWER_CYCLE)),
    ("94", Rule("contained memory error: the process that held the page must go", Action.RESTART_WORKER, limit_24h=3)),
    ("119 120", _GSP),
    ("122-125 142", _CHECK),
    ("151", Rule("key rotation of confidential computing failed", Action.LOST, Needs.NODE_REBOOT)),
    ("154", Rule("the recovery action changed", Action.LOG)),
    ("167 169", _RESET),
    ("168", Rule("the card runs with less memory", Action.DEGRADE, Needs.OPERATOR)),
    ("157 159 162-166 170", _NOTICE),
)
FALLEN_OFF_THE_BUS: Final = 79


def decide(xid: int, context: Context) -> Decision:
    """Judge one XID on one card."""
    rule = TABLE.get(xid, _UNKNOWN)
    said = f"XID {xid}: {rule.meaning}"
    decision = Decision(rule.action, rule.needs, said, rule.leave_alone)
    if rule.only_ours and context.ours is False:
        return Decision(Action.LOG, Needs.NOTHING, f"{said} (not a process of ours)")
    match xid:
        case 13 | 31 if context.count_24h >= 3 and context.others_clean:
            return Decision(
                Action.QUARANTINE,
                Needs.OPERATOR,
                f"{said}, {context.count_24h} times in 24 h on this card only: run diagnostics",
            )
        case 45:
            for since, what in ((context.since_kill_s, "our own kill"), (context.since_other_xid_s, "another XID")):
                if since is not None and since <= ECHO_S:
                    return Decision(Action.IGNORE, Needs.NOTHING, f"{said}, {since:.0f} s after {what}")
        case 109 if context.count_1h >= 2:
            return Decision(Action.QUARANTINE, Needs.RESET, f"{said}, for the second time in an hour")
        case 119 | 120 if context.count_24h >= 2:
            return replace(decision, text=f"{said}, again within 24 h: update the driver, or turn GSP firmware off")
        case 154:
            if (action := _recovery_in(context.text)) is not None and (advice := decide_recovery(action)):
                return replace(advice, text=f"{said}: {advice.text}")
        case _ if rule is _LINK and "fatal" in re.sub(r"non-?\s?fatal", "", context.text.lower()):
            return Decision(Action.QUARANTINE, Needs.RESET, f"{said}, fatal")
    if rule.limit_24h and context.count_24h >= rule.limit_24h:
        return Decision(Action.QUARANTINE, Needs.RESET, f"{said}, {context.count_24h} times in 24 h")
    return decision


_RECOVERY: Final[dict[int, Decision]] = {
    1: Decision(Action.QUARANTINE, Needs.RESET, "the driver asks for a reset of the card"),
    2: Decision(Action.LOST, Needs.NODE_REBOOT, "the driver asks for a reboot of the host"),
    3: Decision(Action.DEGRADE, Needs.RESET_WHEN_CONVENIENT, "the driver asks to end traffic between cards; ours has none"),
    4: Decision(Action.QUARANTINE, Needs.RESET, "the driver asks to drain and reset the card"),
    5: Decision(Action.LOG, Needs.OPERATOR, "the driver asks to recover the IMEX domain"),
    6: Decision(Action.QUARANTINE, Needs.RESET, "the driver asks for a bus reset of the card"),
    7: Decision(Action.LOST, Needs.NODE_REBOOT, "the driver asks for a reboot of the system"),
}  # fmt: skip


def decide_recovery(action: int | None) -> Decision | None:
    """Judge NVML's recovery action (field 230); None: nothing is asked for, or the driver does not know the field."""
    if not action:
        return None
    unknown = Decision(Action.QUARANTINE, Needs.OPERATOR, f"the driver asks for recovery action {action}, which we do not know")
    return _RECOVERY.get(action, unknown)


@dataclass(frozen=True, slots=True)
class KernelXid:
    """One fault as a line of the kernel log tells it. `bus` as in /sys/bus/pci/devices, without the function number."""

    bus: str
    xid: int
    pid: int | None
    text: str
    instance: int | None = None  # the GPU instance of a card in MIG mode


_XID_LINE: Final = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:]+)(?:\.[0-7])?(?: GPU-I:([0-9a-fA-F]+))?[^)]*\): (\d{1,4})\b")
_PID: Final = re.compile(r"\bpid='?(\d+)")
#: Two texts of the driver that tell of a card off the bus without an XID number.
_OFF_THE_BUS: Final = (
    re.compile(r"NVRM:.* GPU ([0-9a-fA-F:]+)(?:\.[0-7])?:? .*has fallen off the bus"),
    re.compile(r"NVRM: GPU (?:at )?(?:PCI:)?([0-9a-fA-F:]+)(?:\.[0-7])?: GPU has fallen off the bus"),
)
_RECOVERY_TEXT: Final = re.compile(r"recovery action changed from \S+ .*?to 0x([0-9a-fA-F]+)")


def parse_kernel_line(line: str) -> KernelXid | None:
    """Read one line of the kernel log; None if it tells of no XID."""
    if "NVRM" not in line:
        return None
    instance = None
    if found := _XID_LINE.search(line):
        bus, xid = bus_name(found[1]), int(found[3])
        instance = int(found[2], 16) if found[2] else None
    elif gone := next((m for p in _OFF_THE_BUS if (m := p.search(line))), None):
        bus, xid = bus_name(gone[1]), FALLEN_OFF_THE_BUS
    else:
        return None
    if bus is None:
        return None
    pid = _PID.search(line)
    return KernelXid(bus, xid, int(pid[1]) if pid else None, line[line.index("NVRM") :].strip(), instance)


def bus_name(text: str) -> str | None:
    """Write a PCI address as sysfs does, less the function: "0000:3b:00" for "00000000:3B:00.0" and "PCI:0000:3b:00"."""
    parts = text.removeprefix("PCI:").partition(".")[0].split(":")
    try:
        domain, bus, device = (int(p, 16) for p in parts)
    except ValueError:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def _recovery_in(text: str) -> int | None:
    found = _RECOVERY_TEXT.search(text)
    return int(found[1], 16) if found else None
