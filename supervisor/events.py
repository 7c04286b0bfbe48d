"""What the pool is told: facts, each about one incarnation where it is about a process. The shell makes them, pool.handle takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpupool.board import SlotRecord


@dataclass(frozen=True, slots=True)
class Started:
    """The supervisor begins. `held`: slots that an operator had drained before a restart of the supervisor."""

    held: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; the board as it reads now, by slot.

    `late_s`: how much later than planned the loop came round. `router_beat`: the instant of the router's last beat, None: not looked at.
    """

    records: Sequence[SlotRecord]
    late_s: float = 0.0
    router_beat: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpawned:
    """A worker process was started."""

    slot: int
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """A worker process could not be started at all."""

    slot: int
    incarnation: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerLoaded:
    """A worker says that its models are loaded and warm; `info` is for the status document."""

    slot: int
    incarnation: int
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker says why it cannot start; its exit follows."""

    slot: int
    incarnation: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """The router registered a worker."""

    slot: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerIdle:
    """A held worker has finished all it was given."""

    slot: int


@dataclass(frozen=True, slots=True)
class WorkerSick:
    """The router saw too many infrastructure errors in a row from a worker."""

    slot: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecycleAsked:
    """A worker should be replaced when that disturbs nobody: it works, but holds memory that a new process would not."""

    slot: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: exit code, or the signal that killed it; what it said last."""

    code: int | None
    signal: str | None = None
    cause: str = ""
    stderr: tuple[str, ...] = ()

    @property
    def disorderly(self) -> bool:
        """Whether it is none of the ends that a worker told to stop can come to: done in order, or by the signals of stopping."""
        return self.code not in (None, 0) or self.signal not in (None, "SIGTERM", "SIGKILL")


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker process ended. `running`: tickets of the batch it was running, None when they cannot be told."""

    slot: int
    incarnation: int
    exit: Exit
    running: Sequence[int] | None = ()


@dataclass(frozen=True, slots=True)
class RouterUp:
    """The router has bound its sockets."""

    epoch: int
    bind: Sequence[str]


@dataclass(frozen=True, slots=True)
class RouterExited:
    """The router process ended."""

    epoch: int
    exit: Exit


@dataclass(frozen=True, slots=True)
class RouterDeaf:
    """A message that the router must know could not be sent to it."""


@dataclass(frozen=True, slots=True)
class RouterDrained:
    """Nothing is pending and nothing in flight."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator wants these slots to take no new work."""

    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """An operator wants these slots to work again, parked ones too."""

    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """An operator wants new processes in these slots; `force` does not wait for their work."""

    slots: Sequence[int]
    force: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """An operator wants these slots' devices for other things: finish, end the process, start none."""

    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class CardJudged:
    """A slot's card must not be used: it is gone (`lost`) or needs something first."""

    slot: int
    lost: bool
    reason: str
    needs: str = ""


@dataclass(frozen=True, slots=True)
class CardReadmitted:
    """A judged card may be used again."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerCondemned:
    """A slot's process is spoilt, its card is not: replace the process."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class CardThrottled:
    """A slot's card can bear this share of its batch (1: all of it)."""

    slot: int
    factor: float
    reason: str


@dataclass(frozen=True, slots=True)
class LeakJudged:
    """A process is suspected of a leak, or no longer. `kind`: host or device; growth since its warm-up, in so many seconds of work."""

    slot: int
    incarnation: int
    kind: str
    suspected: bool
    bytes_per_hour: int
    growth_bytes: int
    worked_s: float


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Drain and stop the pool; asked again: stop waiting."""


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """A reload brought new rules (see pool.Policy)."""

    policy: Any


Event = (
    Started
    | Tick
    | WorkerSpawned
    | SpawnFailed
    | WorkerLoaded
    | WorkerFailed
    | WorkerJoined
    | WorkerIdle
    | WorkerSick
    | RecycleAsked
    | WorkerExited
    | RouterUp
    | RouterExited
    | RouterDeaf
    | RouterDrained
    | DrainAsked
    | ResumeAsked
    | RestartAsked
    | ReleaseAsked
    | CardJudged
    | CardReadmitted
    | WorkerCondemned
    | CardThrottled
    | LeakJudged
    | StopAsked
    | PolicyChanged
)
