"""One connection shared by several calls of a blocking client."""

from __future__ import annotations

from typing import Any

from gpupool.client.connection import Connection


class Link:
    """A link that says once that it was lost."""

    def __init__(self) -> None:
        self.reports = [True]
        self.sent: list[Any] = []

    def lost(self) -> bool:
        return bool(self.reports) and self.reports.pop()

    def send(self, messages: Any) -> bool:
        self.sent.append(messages)
        return True


class Calls:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.disconnects = 0

    def abandon(self, call: Any) -> bytes:
        return b"cancel"

    def disconnected(self) -> None:
        self.disconnects += 1


def test_a_loss_that_is_noticed_while_giving_up_one_call_is_told_to_the_others() -> None:
    connection = Connection.__new__(Connection)
    link, calls = Link(), Calls()
    connection._link, connection.calls = link, calls  # type: ignore[assignment]
    connection.abandon(object())  # type: ignore[arg-type]
    assert calls.disconnects == 1
    assert link.sent == []  # whoever would be told is gone
