"""The line to a supervisor that does not always listen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpupool.channel import MAX_MESSAGE_BYTES, Channel
from gpupool.router import supervisor_line
from gpupool.router.supervisor_line import SupervisorLine


@pytest.fixture
def ends() -> Iterator[tuple[SupervisorLine, Channel]]:
    theirs, ours = Channel.pair()
    with ours:
        yield SupervisorLine(Channel(ours)), theirs
    theirs.close()


def heard(channel: Channel) -> list[int]:
    numbers = []
    while (message := channel.receive()) is not None:
        numbers.append(message["n"])
    return numbers


def test_what_is_not_taken_is_kept_and_comes_in_order(ends: tuple[SupervisorLine, Channel]) -> None:
    line, supervisor = ends
    for n in range(900):  # more than a socket holds
        line.tell({"t": "x", "n": n, "pad": bytes(1000)})
    numbers = heard(supervisor)
    assert 0 < len(numbers) < 900
    while len(numbers) < 900:
        line.flush()
        numbers += heard(supervisor)

    assert numbers == list(range(900))


def test_what_is_kept_has_a_bound_and_the_newest_stay(ends: tuple[SupervisorLine, Channel]) -> None:
    line, supervisor = ends
    for n in range(5000):
        line.tell({"t": "x", "n": n, "pad": bytes(1000)})
    numbers = heard(supervisor)
    at_once = len(numbers)
    for _ in range(5000):
        line.flush()
        numbers += heard(supervisor)

    assert numbers[at_once:] == list(range(5000 - supervisor_line._MAX_UNTOLD, 5000))


def test_a_message_too_large_for_the_line_holds_up_no_other(ends: tuple[SupervisorLine, Channel]) -> None:
    line, supervisor = ends
    with pytest.raises(ValueError, match="the limit is"):
        line.tell({"t": "x", "n": 1, "pad": bytes(MAX_MESSAGE_BYTES)})
    line.tell({"t": "x", "n": 2})

    assert heard(supervisor) == [2]


def test_so_many_are_heard_at_a_time_and_the_end_is_told(ends: tuple[SupervisorLine, Channel]) -> None:
    line, supervisor = ends
    for n in range(150):
        assert supervisor.send({"t": "x", "n": n})

    assert [m["n"] for m in line.hear()] == list(range(100))
    assert [m["n"] for m in line.hear()] == list(range(100, 150))
    supervisor.close()
    with pytest.raises(EOFError):
        list(line.hear())
