"""What the pool wants done: facts to carry out, each with its reason. The shell logs every one, so the log is the story."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Start a process in a slot."""

    slot: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Send a signal to a worker by its pidfd."""

    slot: int
    incarnation: int
    signal: str
    reason: str


@dataclass(frozen=True, slots=True)
class SpawnRouter:
    """Start the router."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class KillRouter:
    """End a router that does not end by itself."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class CloseListeners:
    """Refuse who comes from now on: no router will answer them."""

    reason: str


@dataclass(frozen=True, slots=True)
class TellRouter:
    """Send one channel message (see gpupool.channel)."""

    message: dict[str, Any]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Put shares on the board: of the batch by slot, of the window for all."""

    batch_factors: tuple[float, ...]
    window_factor: float
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Say in the log what happened to a slot, or to the pool."""

    event: str
    slot: int | None
    level: str = "info"
    fields: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Quit:
    """End the supervisor with this exit code."""

    code: int
    reason: str


Command = SpawnWorker | SignalWorker | SpawnRouter | KillRouter | CloseListeners | TellRouter | SetLimits | Report | Quit
