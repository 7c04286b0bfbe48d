"""What waits and what runs: a request's rows, and the batch that some of them make."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from .ceiling import GroupKey


class CloseReason(StrEnum):
    """Why a batch closed."""

    __hash__ = str.__hash__  # Enum's own is written in Python, and batches are counted by this

    FULL = "full"  # the limit is reached
    MIN = "min"  # min_batch are there
    WINDOW = "window"  # the window from the first arrival is over
    DEADLINE = "deadline"  # a member cannot wait longer
    IDLE = "idle"  # waiting would cost more than it saves
    ALONE = "alone"  # a suspect, which runs by itself


@dataclass(slots=True, eq=False)
class Item:
    """One request's rows in one bucket. `deadline` in monotonic seconds; `taken` rows have left in batches already."""

    ticket: int
    key: GroupKey
    deadline: float
    rows: int = 1
    priority: int = 5
    alone: bool = False
    owner: Any = None  # what the shell wants back with it
    begun: bool = False  # the model's code has had it already: it is to be finished here
    arrived: float = field(default=0.0, init=False)
    taken: int = field(default=0, init=False)
    order: tuple[int, int] = field(default=(0, 0), init=False)


class Share(NamedTuple):
    """Rows `start` to `stop` of an item, in a batch."""

    item: Item
    start: int
    stop: int


class Batch(NamedTuple):
    """What runs now. `key` is that of its longest rows: those of shorter buckets may fill it up."""

    key: GroupKey
    shares: list[Share]
    rows: int
    reason: CloseReason

    @property
    def tickets(self) -> list[int]:
        """The requests that the batch holds rows of."""
        return [share.item.ticket for share in self.shares]
