"""What card health asks of the pool: each a fact about one device, with its reason. See health."""

from __future__ import annotations

from dataclasses import dataclass

from .xid import Needs


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """Replace the device's process; the card itself is fine."""

    uuid: str
    reason: str
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Quarantine:
    """End the device's process now and start none until Readmit."""

    uuid: str
    reason: str
    needs: Needs


@dataclass(frozen=True, slots=True)
class Lose:
    """The card is gone: end its process and start none until Readmit."""

    uuid: str
    reason: str
    needs: Needs


@dataclass(frozen=True, slots=True)
class Readmit:
    """The device may be used again."""

    uuid: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetCardFactor:
    """Give the device this share of batch and weight."""

    uuid: str
    factor: float
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveAlone:
    """Have the probe ask this device nothing for some seconds: the driver's calls about it may hang."""

    uuid: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Say it in the log."""

    level: str  # "debug", "info", "warning", "error"
    text: str
    uuid: str | None = None
    xid: int | None = None


CardVerdict = RestartWorker | Quarantine | Lose | Readmit | SetCardFactor | LeaveAlone | Note
