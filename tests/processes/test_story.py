"""A worker is killed under load: `events` tells it over the supervisor's end too, `explain` tells what it was to one request."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from support.running import FAST, Load, RunningPool, until

pytestmark = pytest.mark.processes
MakePool = Callable[..., RunningPool]


def told(pool: RunningPool, *names: str, **wanted: Any) -> dict[str, list[dict[str, Any]]]:
    """Ask until each of these events has been told."""
    for _ in until(10.0):
        events = pool.ask("events", limit=1000, **wanted)["result"]["events"]
        found = {name: [e for e in events if e["event"] == name] for name in names}
        if all(found.values()):
            return found
    raise AssertionError(f"not all told: {found}")


def lost_at_it(pool: RunningPool) -> list[dict[str, Any]]:
    """Returns of requests that a worker died with; one that could no longer be sent to it (`send_failed`) was not lost there."""
    return [move for move in pool.records("request_redispatched") if move["reason"] == "crash"]


def test_the_story_of_a_killed_worker(make_pool: MakePool) -> None:
    pool = make_pool("Sleep", options="seconds = 0.02", config=FAST).start()
    load = Load(pool, rate=150)
    load.wait_for(50)
    for _ in until(30.0):  # killed with something in its hands: tried until that was so
        incarnation = pool.worker(0)["incarnation"]
        os.kill(pool.worker(0)["pid"], signal.SIGKILL)
        pool.wait_for_incarnation(0, incarnation + 1)
        if lost_at_it(pool):
            break
    load.wait_for(50)
    assert set(load.stop()) == {"ok"}

    for _ in until(10.0):  # the redispatches of the latest death may be in the log before the death is in the journal
        story = told(pool, "worker_exited", "worker_lost", worker="cpu:0")
        if sum(e["outstanding"] for e in story["worker_lost"]) >= len(lost_at_it(pool)):
            break
    exit_, lost = story["worker_exited"][0], story["worker_lost"][0]
    assert (exit_["device"], exit_["worker"], exit_["signal"], exit_["level"]) == ("cpu:0", 0, "SIGKILL", "error")
    assert (lost["device"], lost["component"]) == ("cpu:0", "router")
    assert sum(e["outstanding"] for e in story["worker_lost"]) >= len(lost_at_it(pool)) > 0
    assert pool.ask("events", worker="1", level="warning")["result"]["events"] == []
    for wrong in ({"limit": 0}, {"level": "loud"}, {"since_s": "x"}, {"after": "x"}, {"worker": "9"}):
        assert not pool.ask("events", **wrong)["ok"], wrong

    move = lost_at_it(pool)[0]
    done = pool.cli("explain", move["request_id"], "--client", move["client"], "--json")
    assert done.returncode == 0, done.stderr
    (life,) = json.loads(done.stdout)["lives"]
    request = life["request"]
    assert request["code"] == "ok"
    assert sum(part["ms"] for part in life["parts"]) == pytest.approx(request["total_ms"])
    assert all(part["ms"] >= 0 for part in life["parts"])
    assert life["parts"][1] == {"name": "lost there (crash)", "ms": move["held_ms"], "worker": 0}
    assert {life["parts"][1]["worker"], life["parts"][-1]["worker"]} == {0, request["worker"]}
    assert request["ticket"] > move["ticket"]
    assert "worker_exited" in [event["event"] for event in life["around"]]
    assert life["devices"]["0"] == "cpu:0"

    last = pool.ask("events")["result"]["last"]
    os.kill(pool.pid, signal.SIGKILL)
    assert pool.process is not None
    pool.process.wait(10)
    down = pool.cli("events", "-n", "1000", "--json")
    assert down.returncode == 0
    assert exit_ in json.loads(down.stdout)["events"]
    pool.start()
    assert exit_ in told(pool, "worker_exited")["worker_exited"]
    begun = told(pool, "pool_starting", after=last)["pool_starting"]
    assert [event["n"] > last for event in begun] == [True]
    (died,) = told(pool, "earlier_supervisor_died")["earlier_supervisor_died"]
    assert died["last_at"] >= datetime.fromtimestamp(exit_["time"], UTC).isoformat()

    pool.close()
    pool.start()
    assert len(told(pool, "earlier_supervisor_died")["earlier_supervisor_died"]) == 1  # that one ended as it should
