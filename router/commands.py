"""What the router's core asks its shell to do. They are made for every request, so they are plain slotted records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .requests import Request
from .tracing import Finished


@dataclass(slots=True)
class Reply:
    """Send these frames to a client (its routing id leads), and write the request's one log record (empty: not in the sample). No frames: the client is gone."""

    frames: list[bytes]
    record: dict[str, Any]


@dataclass(slots=True)
class SendWork:
    """Send requests, already marked with their tickets, to one worker. If that fails: `Dispatch.send_failed`."""

    peer: bytes
    requests: list[Request]


@dataclass(slots=True)
class SendTickets:
    """Send a link message that is a list of numbers to one worker: WELCOME or CANCEL."""

    peer: bytes
    kind: bytes
    tickets: Sequence[int]


@dataclass(slots=True)
class Tell:
    """Send a message to the supervisor."""

    message: dict[str, Any]


@dataclass(slots=True)
class Event:
    """Write a log event. `told`: to the supervisor too, for the pool's journal; for rare ones only."""

    level: str
    name: str
    fields: dict[str, Any]
    told: bool = False


@dataclass(slots=True)
class Export:
    """Have the spans of a traced request exported."""

    finished: Finished


@dataclass(slots=True)
class Quit:
    """Flush the sockets and exit: nothing is open any more."""


Command = Reply | SendWork | SendTickets | Tell | Event | Export | Quit
