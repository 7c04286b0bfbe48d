"""One slot as the pool remembers it, and the steps by which its process is made to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from .lifecycle import ALIVE, COMING, Change, State, after
from .restart import RestartHistory

#: How long a hung process may take for the stack dump that SIGABRT asks for.
DUMP_S: Final = 2.0
#: How long the kernel may take to end a process after SIGKILL. One that is stuck in a driver call never ends.
KILL_S: Final = 10.0


class Purpose(StrEnum):
    """Why a process is being ended; decides what follows its exit."""

    NONE = "none"  # nobody asked: a crash
    RESTART = "restart"  # an operator wants a new one at once
    RECYCLE = "recycle"  # it has grown, or run for long enough, and a new one takes its place
    REST = "rest"  # none wanted afterwards: the pool stops, or an operator has the device
    REPLACE = "replace"  # it is stuck or sick: counts like a crash
    CARD = "card"  # its card was judged


@dataclass(frozen=True, slots=True)
class Step:
    """One signal and how long to wait for the exit before the next step."""

    signal: str
    wait_s: float


def gentle(stop_timeout_s: float) -> list[Step]:
    """Ask, then kill. SIGCONT goes along with every asking signal, else a stopped process would not see it."""
    return [Step("SIGTERM", stop_timeout_s), Step("SIGKILL", KILL_S)]


def hung() -> list[Step]:
    """Make it dump its stacks, then kill."""
    return [Step("SIGABRT", DUMP_S), Step("SIGKILL", KILL_S)]


def forced() -> list[Step]:
    """Kill."""
    return [Step("SIGKILL", KILL_S)]


@dataclass(slots=True)
class Slot:
    """The permanent place of one device. `overflow`: of an extra one, which does not count as capacity."""

    number: int
    overflow: bool = False
    state: State = State.STOPPED
    since: float = 0.0
    incarnation: int = 0
    pid: int | None = None
    spawned_at: float = 0.0
    ready_at: float | None = None
    joined: bool = False  # registered with the present router
    held: bool = False  # drained by an operator; outlives the process
    failed: bool = False  # its process said that it cannot start, and why
    late: bool = False  # its beat is missing: no new work for now
    crashed: bool = False  # its last process died unasked and the next one is not ready yet
    on_probation: bool = False  # started half-open from parked: the next death parks it again
    purpose: Purpose = Purpose.NONE
    reason: str = ""
    ladder: list[Step] = field(default_factory=list)
    step_ends_at: float = 0.0
    drain_ends_at: float | None = None
    due_at: float | None = None  # next start: end of a back-off, or a parked slot's half-open try
    last_exit: dict[str, Any] | None = None
    obituary: dict[str, Any] | None = None  # what the router was told of its last process's end
    history: RestartHistory = field(default_factory=RestartHistory.empty)
    info: dict[str, Any] = field(default_factory=dict)
    batches: int = 0
    sentence: Change | None = None  # QUARANTINE or LOSE, while its card is judged
    needs: str = ""  # what the card needs before it is used again
    leaks: set[str] = field(default_factory=set)  # kinds of memory that its process is suspected to leak
    renewal: str = ""  # why its process has asked to be renewed
    renewal_asked_at: float = 0.0  # when it last did
    card_factor: float = 1.0  # share of the batch that the card can bear, below 1 while it throttles

    @property
    def wants_hold(self) -> bool:
        """Whether the router shall give it no new work."""
        return self.held or self.state in (State.DRAINING, State.DRAINED)

    @property
    def wants_avoid(self) -> bool:
        """Whether the router shall give it nothing new although nobody holds it: it is late, or being ended."""
        return self.late or self.state == State.STOPPING

    def change(self, change: Change, now: float) -> None:
        """Move to the state that the table names."""
        state = after(self.state, change)
        if state != self.state:
            self.state, self.since = state, now

    @property
    def alive(self) -> bool:
        """Whether a process exists."""
        return self.state in ALIVE

    @property
    def serving(self) -> bool:
        """Whether its process may have requests."""
        return self.state in (State.READY, State.DRAINING)

    @property
    def works(self) -> bool:
        """Whether it takes work; one whose beat is missing does not, until it is back."""
        return self.state == State.READY and self.joined and not self.late

    @property
    def restarting(self) -> bool:
        """Whether its process is being ended so that a new one takes its place."""
        return self.purpose in (Purpose.RESTART, Purpose.RECYCLE)

    @property
    def coming(self) -> bool:
        """Whether it will come to serve by itself."""
        return self.state in COMING or self.restarting

    @property
    def restarts(self) -> int:
        """Processes after the first."""
        return max(0, self.incarnation - 1)

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with it: serving, on its first start, or away by an operator's wish."""
        if self.state in (State.READY, State.DRAINING, State.DRAINED):
            return True
        if self.restarting or (self.held and not self.crashed and self.sentence is None):
            return True
        waiting = self.state == State.BACKING_OFF and not self.reason
        return not self.crashed and (waiting or self.state in (State.STARTING, State.LOADING))

    def stable(self, now: float, stable_after_s: float) -> bool:
        """Whether its process served long enough, with real batches, to count as sound."""
        return self.ready_at is not None and now >= self.ready_at + stable_after_s and self.batches > 0
