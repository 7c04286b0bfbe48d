"""Sockets that somebody removes while the pool runs are made anew, and not too soon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpupool.logs import Log
from gpupool.supervisor import events as ev
from gpupool.supervisor.control import ControlServer
from gpupool.supervisor.instance import Instance
from gpupool.supervisor.listeners import Listeners
from gpupool.supervisor.socket_watch import SocketWatch


class Bench:
    """A runtime directory with two files for sockets; notes what is done about them."""

    def __init__(self, folder: Path) -> None:
        self.runtime = SimpleNamespace(workers=folder / "workers", control=folder / "control")
        self.runtime.workers.touch()
        self.runtime.control.touch()
        self.done: list[str] = []
        self.fed: list[ev.Event] = []
        self.broken = False
        note = self.done.append
        event = SimpleNamespace(error=lambda name, **_: note(name))
        self.watch = SocketWatch(
            cast("Instance", SimpleNamespace(runtime=self.runtime, restore=self.restore)),
            cast("Listeners", SimpleNamespace(reopen_workers=self.runtime.workers.touch)),
            cast("ControlServer", SimpleNamespace(close=lambda: None, start=self.start_control)),
            feed=self.fed.append,
            log=cast("Log", SimpleNamespace(event=event)),
        )

    def restore(self) -> None:
        if self.broken:
            raise PermissionError(13, "not ours")

    async def start_control(self) -> None:
        self.runtime.control.touch()

    async def tick(self, *instants: float, **wanted: Any) -> None:
        for now in instants:
            self.watch.tick(now, workers_wanted=wanted.get("workers_wanted", True))
            await asyncio.sleep(0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_nothing_is_done_while_all_is_there(bench: Bench) -> None:
    asyncio.run(bench.tick(0.0, 3.0, 6.0))

    assert not bench.done
    assert not bench.fed


def test_the_workers_socket_is_made_anew_and_another_router_asked_for(bench: Bench) -> None:
    bench.runtime.workers.unlink()
    asyncio.run(bench.tick(10.0, 12.0))
    assert not bench.done

    asyncio.run(bench.tick(12.1, 12.2, 20.0))

    assert bench.done == ["sockets_vanished"]
    assert bench.runtime.workers.exists()
    assert bench.fed == [ev.RouterDeaf()]


def test_the_control_socket_is_made_anew_and_the_router_left_alone(bench: Bench) -> None:
    bench.runtime.control.unlink()
    asyncio.run(bench.tick(10.0, 12.1, 12.2))

    assert bench.runtime.control.exists()
    assert not bench.fed


def test_one_that_comes_back_in_time_is_none_that_was_removed(bench: Bench) -> None:
    bench.runtime.control.unlink()
    asyncio.run(bench.tick(10.0))
    bench.runtime.control.touch()
    asyncio.run(bench.tick(11.0))
    bench.runtime.control.unlink()
    asyncio.run(bench.tick(12.5))

    assert not bench.done


def test_the_workers_socket_is_not_missed_while_none_is_wanted(bench: Bench) -> None:
    bench.runtime.workers.unlink()
    asyncio.run(bench.tick(10.0, 20.0, workers_wanted=False))

    assert not bench.done


def test_a_directory_that_cannot_be_mended_is_told_once_in_a_while_and_ends_nothing(bench: Bench) -> None:
    bench.runtime.workers.unlink()
    bench.broken = True
    asyncio.run(bench.tick(10.0, 12.1, 13.0, 14.2))

    assert bench.done == ["sockets_vanished", "runtime_directory_lost"] * 2
    assert not bench.fed
