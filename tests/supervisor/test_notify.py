"""What the service manager hears, on a real datagram socket; the time is numbers."""

from __future__ import annotations

import math
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpupool.supervisor.notify import Notifier


class Manager:
    """systemd's end of the line."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._made: list[Notifier] = []

    def heard(self) -> list[str]:
        """All that came since the last look."""
        messages = []
        with suppress(BlockingIOError):
            while True:
                messages.append(self.socket.recv(4096).decode())
        return messages

    def notifier(self, **environment: str) -> Notifier:
        """One that talks to this manager."""
        self._made.append(Notifier({"NOTIFY_SOCKET": self.address, **environment}))
        return self._made[-1]

    def close(self) -> None:
        """Both ends."""
        for each in self._made:
            each.close()
        self.socket.close()


@pytest.fixture
def manager() -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:  # a socket's path must be short
        made = Manager(f"{folder}/notify")
        yield made
        made.close()


def beat(notifier: Notifier, start: float, end: float, *, loading: bool = False, every: float = 0.5) -> None:
    """Tick from `start` to before `end`."""
    for n in range(math.ceil((end - start) / every)):
        notifier.tick(start + n * every, loading=loading)


def test_a_third_of_the_watchdog_s_period_lies_between_two_pings(manager: Manager) -> None:
    notifier = manager.notifier(WATCHDOG_USEC="6000000", WATCHDOG_PID=str(os.getpid()))

    beat(notifier, 100.0, 110.0)

    assert manager.heard() == ["WATCHDOG=1"] * 5  # at 100, 102, 104, 106, 108
    assert notifier.tick_within_s == 2.0


def test_no_tick_no_ping(manager: Manager) -> None:
    notifier = manager.notifier(WATCHDOG_USEC="3000000")
    notifier.ready()
    notifier.status("fine")
    assert "WATCHDOG=1" not in manager.heard()


def test_after_a_pause_there_is_one_ping_and_not_one_for_each_that_was_missed(manager: Manager) -> None:
    notifier = manager.notifier(WATCHDOG_USEC="3000000")
    notifier.tick(100.0, loading=False)
    manager.heard()

    notifier.tick(500.0, loading=False)
    notifier.tick(500.5, loading=False)

    assert manager.heard() == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "-1"},
        {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"},
    ],
    ids=["none", "zero", "text", "negative", "for another process"],
)
def test_no_watchdog_no_ping(manager: Manager, environment: dict[str, str]) -> None:
    notifier = manager.notifier(**environment)
    beat(notifier, 0.0, 60.0)
    assert manager.heard() == []


def test_a_long_load_asks_for_thirty_seconds_every_ten(manager: Manager) -> None:
    notifier = manager.notifier()

    beat(notifier, 100.0, 125.0, loading=True)
    assert manager.heard() == ["EXTEND_TIMEOUT_USEC=30000000"] * 3  # at 100, 110, 120

    notifier.ready()
    beat(notifier, 125.0, 200.0)
    assert manager.heard() == ["READY=1"]


def test_a_start_that_has_failed_asks_for_no_more_time(manager: Manager) -> None:
    notifier = manager.notifier()
    beat(notifier, 0.0, 60.0, loading=False)
    assert manager.heard() == []


def test_a_stop_is_told_once_and_asks_for_time_while_it_may_last(manager: Manager) -> None:
    notifier = manager.notifier()
    notifier.ready()
    notifier.stopping(100.0, within_s=25.0)
    beat(notifier, 100.0, 110.0)
    notifier.stopping(110.0, within_s=25.0)  # the second signal

    beat(notifier, 110.0, 200.0)

    assert manager.heard() == ["READY=1", "STOPPING=1", *["EXTEND_TIMEOUT_USEC=30000000"] * 3]


def test_a_reload_is_announced_with_the_time_and_ended_by_ready(manager: Manager) -> None:
    notifier = manager.notifier()
    notifier.ready()
    notifier.reloading(1234.5)
    notifier.reloaded()
    assert manager.heard() == ["READY=1", "RELOADING=1\nMONOTONIC_USEC=1234500000", "READY=1"]


def test_a_long_reload_asks_for_more_time_but_not_for_ever(manager: Manager) -> None:
    notifier = manager.notifier()
    notifier.ready()
    notifier.reloading(100.0)
    manager.heard()
    beat(notifier, 100.0, 180.0)
    assert manager.heard() == ["EXTEND_TIMEOUT_USEC=30000000"] * 8
    beat(notifier, 180.0, 300.0)
    assert manager.heard() == ["EXTEND_TIMEOUT_USEC=30000000"] * 4  # until 220, when the command that asked has given up
    notifier.reloading(300.0)
    notifier.reloaded()
    manager.heard()
    beat(notifier, 300.0, 400.0)
    assert manager.heard() == []


def test_a_reload_before_the_pool_serves_does_not_claim_that_it_does(manager: Manager) -> None:
    notifier = manager.notifier()
    notifier.reloading(1.0)
    notifier.reloaded()
    assert manager.heard() == []


def test_a_reload_does_not_call_a_stopping_pool_ready(manager: Manager) -> None:
    notifier = manager.notifier()
    notifier.ready()
    notifier.reloading(1.0)
    notifier.stopping(2.0, within_s=10.0)
    manager.heard()
    notifier.reloaded()
    notifier.reloading(3.0)
    assert manager.heard() == []


def test_a_status_is_sent_when_it_changes(manager: Manager) -> None:
    notifier = manager.notifier()
    for text in ("one", "one", "two", "one"):
        notifier.status(text)
    assert manager.heard() == ["STATUS=one", "STATUS=two", "STATUS=one"]


def test_what_the_manager_had_no_room_for_arrives_later_in_order(manager: Manager) -> None:
    notifier = manager.notifier()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as other, suppress(BlockingIOError):
        while True:
            other.sendto(b"filler", manager.address)

    notifier.ready()
    for n in range(30):
        notifier.status(f"serving {n}")
    assert set(manager.heard()) == {"filler"}

    notifier.tick(0.0, loading=False)
    assert manager.heard() == ["READY=1", "STATUS=serving 29"]


def test_a_manager_that_has_gone_harms_nobody(manager: Manager) -> None:
    notifier = manager.notifier(WATCHDOG_USEC="3000000")
    manager.socket.close()
    Path(manager.address).unlink()
    notifier.ready()
    for n in range(100):
        notifier.status(str(n))
        notifier.tick(float(n), loading=True)


def test_an_abstract_address_works() -> None:
    manager = Manager(f"@gpupool-test-{os.getpid()}")
    manager.notifier().ready()
    assert manager.heard() == ["READY=1"]
    manager.close()


def test_without_a_manager_nothing_is_sent_and_nothing_is_wanted() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "3000000"})
    notifier.ready()
    notifier.status("fine")
    notifier.reloading(1.0)
    notifier.reloaded()
    notifier.stopping(2.0, within_s=1.0)
    notifier.tick(3.0, loading=True)
    assert notifier.send(READY=1)
    assert notifier.tick_within_s == math.inf
