"""The life of one slot: its states, what can happen in each, and where that leads, as one table.

A slot is the permanent place of one device; processes come and go in it, each with a higher incarnation number. A pair that is not in
the table is a bug and raises StateError: nothing is silently ignored here. What is done on the way stands in pool.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """What a slot is doing; the words of the status document."""

    STARTING = "starting"  # a process was spawned and has not reached its models yet
    LOADING = "loading"  # it imports, loads or warms up its models
    READY = "ready"  # registered with the router, takes work
    DRAINING = "draining"  # no new work; what was accepted is being finished
    DRAINED = "drained"  # idle by the operator's wish; the process stays
    STOPPING = "stopping"  # was told to end, by steps that get harder
    BACKING_OFF = "backing_off"  # the next start waits: for its delay after a death, for its turn, or for its card
    PARKED = "parked"  # died too often, or no restart can help
    QUARANTINED = "quarantined"  # its card needs a reset or an operator
    LOST = "lost"  # its card is gone
    UNKILLABLE = "unkillable"  # survived SIGKILL: stuck in the kernel, nothing more is started on that card
    STOPPED = "stopped"  # no process, and none wanted


class Change(StrEnum):
    """What can happen to a slot."""

    SPAWN = "spawn"  # a process is being started
    WAIT = "wait"  # a process is to be started, but not yet
    PROGRESS = "progress"  # the process reached its models
    JOIN = "join"  # registered with the router
    HOLD = "hold"  # no new work (operator's drain, planned restart)
    IDLE = "idle"  # all accepted work is finished
    RELEASE = "release"  # take work again
    STOP = "stop"  # the process is told to end
    RETRY = "retry"  # the process ended; start again later
    PARK = "park"  # the process ended; no start by itself
    REST = "rest"  # the process ended; none wanted
    SURVIVE = "survive"  # the process did not end after SIGKILL
    QUARANTINE = "quarantine"  # the card was judged
    LOSE = "lose"  # the card is gone
    READMIT = "readmit"  # the card is back, or was cleared


class StateError(RuntimeError):
    """A change that cannot happen in this state: our bug."""


_S, _C = State, Change
_ENDED: Final = {
    _C.RETRY: _S.BACKING_OFF,
    _C.PARK: _S.PARKED,
    _C.REST: _S.STOPPED,
    _C.QUARANTINE: _S.QUARANTINED,
    _C.LOSE: _S.LOST,
}
_WAITING: Final = {
    _C.SPAWN: _S.STARTING, _C.WAIT: _S.BACKING_OFF, _C.REST: _S.STOPPED, _C.QUARANTINE: _S.QUARANTINED, _C.LOSE: _S.LOST, _C.PARK: _S.PARKED,
}  # fmt: skip

TABLE: Final[dict[State, dict[Change, State]]] = {
    _S.STARTING: {_C.PROGRESS: _S.LOADING, _C.JOIN: _S.READY, _C.STOP: _S.STOPPING, **_ENDED},
    _S.LOADING: {_C.JOIN: _S.READY, _C.STOP: _S.STOPPING, **_ENDED},
    _S.READY: {_C.HOLD: _S.DRAINING, _C.STOP: _S.STOPPING, **_ENDED},
    _S.DRAINING: {_C.IDLE: _S.DRAINED, _C.RELEASE: _S.READY, _C.STOP: _S.STOPPING, **_ENDED},
    _S.DRAINED: {_C.RELEASE: _S.READY, _C.HOLD: _S.DRAINING, _C.STOP: _S.STOPPING, **_ENDED},
    _S.STOPPING: {_C.STOP: _S.STOPPING, _C.SURVIVE: _S.UNKILLABLE, **_ENDED},
    _S.BACKING_OFF: _WAITING,
    _S.PARKED: _WAITING,
    _S.STOPPED: _WAITING,
    _S.QUARANTINED: {_C.READMIT: _S.STOPPED, _C.LOSE: _S.LOST, _C.REST: _S.QUARANTINED, _C.QUARANTINE: _S.QUARANTINED},
    _S.LOST: {_C.READMIT: _S.STOPPED, _C.QUARANTINE: _S.QUARANTINED, _C.REST: _S.LOST, _C.LOSE: _S.LOST},
    # The process may still end one day (the driver let go of it); until then the card counts as taken.
    _S.UNKILLABLE: dict(_ENDED),
}

#: States in which a process exists.
ALIVE: Final = frozenset({_S.STARTING, _S.LOADING, _S.READY, _S.DRAINING, _S.DRAINED, _S.STOPPING, _S.UNKILLABLE})
#: States from which the slot will come to serve by itself.
COMING: Final = frozenset({_S.STARTING, _S.LOADING, _S.BACKING_OFF})


def after(state: State, change: Change) -> State:
    """Return the state that a change leads to.

    Raises:
        StateError: when the change cannot happen in that state.
    """
    try:
        return TABLE[state][change]
    except KeyError:
        raise StateError(f"{change} in state {state}") from None
