"""One connection shared by several calls of a blocking client."""

from __future__ import annotations

import threading
from typing import Any

import msgpack

from gpupool.client.calls import Calls
from gpupool.client.connection import Connection


class Link:
    """A link that says when it was lost, once, and keeps what is sent."""

    refused = False

    def __init__(self) -> None:
        self.reports: list[bool] = []
        self.sent: list[dict[str, Any]] = []
        self.socket = self
        self.closed = False

    def lost(self) -> bool:
        return bool(self.reports) and self.reports.pop()

    def send(self, message: list[bytes]) -> bool:
        self.sent.append(msgpack.unpackb(message[0]))
        return True

    def close(self) -> None:
        self.closed = True


def connection(link: Link) -> Connection:
    made = Connection.__new__(Connection)
    made._link, made.calls, made._lock = link, Calls("tcp://here"), threading.Lock()  # type: ignore[assignment]
    return made


def test_a_loss_that_is_noticed_while_giving_up_one_call_is_told_to_the_others() -> None:
    link = Link()
    shared = connection(link)
    given_up, other = shared.calls.infer(1, 0.0), shared.calls.infer(2, 0.0)
    shared.flush()
    link.sent.clear()
    link.reports = [True]
    shared.abandon(given_up)
    assert [h["id"] for h in link.sent] == [other.id]  # sent again; whoever would be told of the other is gone


def test_closing_cancels_what_is_open_before_it_hangs_up() -> None:
    link = Link()
    shared = connection(link)
    calls = [shared.calls.infer(n, 0.0) for n in range(2)]
    shared.flush()
    link.sent.clear()
    assert shared.close(timeout_s=1.0)
    assert sorted(h["id"] for h in link.sent) == sorted(c.id for c in calls)
    assert {h["type"] for h in link.sent} == {"cancel"}
    assert link.closed
