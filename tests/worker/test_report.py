"""The worker's report: when it goes, and what a broken part does not break."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from gpupool.channel import Channel
from gpupool.worker.report import Report


class Bench:
    """A report with the other end of its channel, at a time that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.theirs, sock = Channel.pair()
        self.log = mock.Mock()
        self.ours = Channel.from_fd(sock.detach())
        self.report = Report(self.ours, self.log, lambda: self.now)

    def told(self) -> list[dict[str, Any]]:
        self.report.tick()
        messages = []
        while (message := self.theirs.receive()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_parts_are_told_once_a_second(bench: Bench) -> None:
    bench.report.add("memory", lambda: {"used_bytes": 5})

    assert bench.told() == [{"t": "report", "memory": {"used_bytes": 5}}]
    bench.now += 0.9
    assert bench.told() == []
    bench.now += 0.2
    assert len(bench.told()) == 1


def test_a_part_that_fails_is_left_out_and_told_of_once(bench: Bench) -> None:
    bench.report.add("broken", lambda: 1 / 0)
    bench.report.add("well", lambda: 1)
    for _ in range(3):
        bench.now += 1.0
        assert bench.told() == [{"t": "report", "well": 1}]

    bench.log.event.error.assert_called_once()


def test_what_cannot_be_sent_is_told_of_once(bench: Bench) -> None:
    bench.report.add("odd", object)
    for _ in range(3):
        bench.now += 1.0
        assert bench.told() == []

    bench.log.event.error.assert_called_once()
