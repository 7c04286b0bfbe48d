"""The table of slot states, read a second time by other hands."""

from __future__ import annotations

import pytest

from gpupool.supervisor.lifecycle import ALIVE, TABLE, Change, State, StateError, after

#: A life told as steps; each must lead where it says.
STORIES: dict[str, list[tuple[Change, State]]] = {
    "a good start": [(Change.SPAWN, State.STARTING), (Change.PROGRESS, State.LOADING), (Change.JOIN, State.READY)],
    "drained and back": [
        (Change.SPAWN, State.STARTING), (Change.JOIN, State.READY), (Change.HOLD, State.DRAINING), (Change.IDLE, State.DRAINED),
        (Change.RELEASE, State.READY), (Change.HOLD, State.DRAINING), (Change.RELEASE, State.READY),
    ],
    "crash, again, parked, resumed": [
        (Change.SPAWN, State.STARTING), (Change.RETRY, State.BACKING_OFF), (Change.SPAWN, State.STARTING), (Change.PARK, State.PARKED),
        (Change.SPAWN, State.STARTING),
    ],
    "stuck for ever, then let go": [
        (Change.SPAWN, State.STARTING), (Change.JOIN, State.READY), (Change.STOP, State.STOPPING), (Change.SURVIVE, State.UNKILLABLE),
        (Change.RETRY, State.BACKING_OFF),
    ],
    "a card lost and found": [
        (Change.SPAWN, State.STARTING), (Change.JOIN, State.READY), (Change.LOSE, State.LOST), (Change.READMIT, State.STOPPED),
        (Change.SPAWN, State.STARTING), (Change.JOIN, State.READY), (Change.QUARANTINE, State.QUARANTINED), (Change.LOSE, State.LOST),
    ],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_stories_lead_where_they_should(story: str) -> None:
    state = State.STOPPED
    for change, expected in STORIES[story]:
        state = after(state, change)
        assert state == expected


def test_a_change_that_cannot_happen_is_a_bug() -> None:
    with pytest.raises(StateError, match="join in state parked"):
        after(State.PARKED, Change.JOIN)


def test_every_state_is_in_the_table_and_can_be_left() -> None:
    assert set(TABLE) == set(State)
    assert all(TABLE.values())


@pytest.mark.parametrize("state", sorted(ALIVE))
def test_a_process_can_end_in_every_state_that_has_one(state: State) -> None:
    for change in (Change.RETRY, Change.PARK, Change.REST):
        assert after(state, change) not in ALIVE


@pytest.mark.parametrize("state", sorted(set(State) - ALIVE))
def test_nothing_is_started_on_a_card_that_was_judged(state: State) -> None:
    assert (Change.SPAWN in TABLE[state]) == (state not in (State.QUARANTINED, State.LOST))
