"""`python -m drills.churn [ROUNDS]`: what hundreds of deaths leave behind in the supervisor, and what it costs while nothing happens.

Kills workers in turn under load and waits each time until both are ready. Latency is from the kill to the moment at which the router had the dead
worker's requests back, by its own log; deaths that found the worker without requests do not count there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from gpupool.board import Board, Phase, SlotWord
from gpupool.supervisor import events as ev
from gpupool.supervisor.liveness import LivenessPolicy
from gpupool.supervisor.policy import Policy
from gpupool.supervisor.pool import Pool
from gpupool.supervisor.restart import RestartPolicy
from support.running import Load, RunningPool

CONFIG: Final = """
[supervision]
restart_delays_s = [0.0]
max_restarts = 100000
"""
_REST_S: Final = 10.0
_TICKS: Final = 2000


def main() -> int:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the start\n\n| what | figure |\n| --- | --- |")
    read_us, core_us = tick(16)
    print(f"| tick, 16 ready slots | {read_us + core_us:.0f} us: board {read_us:.0f}, core {core_us:.0f} |")
    for workers in (2, 16):
        print(f"| supervisor at rest, {workers} workers | {at_rest(workers):.2f} % of a core |", flush=True)
    return 0 if churn(rounds) else 1


def tick(slots: int) -> tuple[float, float]:
    """Median microseconds of reading the board and of the core's part, with that many ready workers."""
    board, policy = Board.create(slots), LivenessPolicy(heartbeat_timeout_s=2.0, load_timeout_s=600.0, batch_timeout_s=60.0)
    restart = RestartPolicy(delays_s=[0.0], stable_after_s=300.0, max_restarts=5, period_s=600.0)
    pool = Pool(slots, Policy(restart, policy), random.Random())
    now = time.monotonic()
    pool.handle(ev.Started(), now)
    pool.handle(ev.RouterUp(1, ["tcp://127.0.0.1:1"]), now)
    for slot in range(slots):
        board.claim(slot, 1, 1)
        board.set_slot(slot, SlotWord.PHASE, Phase.IDLE)
        pool.handle(ev.WorkerSpawned(slot, 1, 1), now)
        pool.handle(ev.WorkerJoined(slot, 1), now)
    reads, cores = [], []
    for _ in range(_TICKS):
        for slot in range(slots):
            board.set_slot(slot, SlotWord.BEAT_NS, time.monotonic_ns())
        a = time.perf_counter_ns()
        records = [board.read(slot) for slot in range(slots)]
        b = time.perf_counter_ns()
        pool.handle(ev.Tick(records), time.monotonic())
        reads.append(b - a)
        cores.append(time.perf_counter_ns() - b)
    assert pool.ready_count == slots
    board.close()
    return median(reads) / 1e3, median(cores) / 1e3


def at_rest(workers: int) -> float:
    """Percent of a core that the supervisor takes with idle workers and default settings."""
    with tempfile.TemporaryDirectory() as folder, RunningPool(Path(folder), workers=workers) as pool:
        pool.start(ready=False)
        pool.wait(lambda s: s["pool"]["workers_ready"] == workers, within=120.0)
        process = psutil.Process(pool.pid)
        time.sleep(2.0)  # what the start left to do
        before = sum(process.cpu_times()[:2])
        time.sleep(_REST_S)
        used: float = sum(process.cpu_times()[:2]) - before
        return 100 * used / _REST_S


def churn(rounds: int) -> bool:
    """Kill and kill; print what is left of it. True when no request was lost."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningPool(Path(folder), "Sleep", options="seconds = 0.02", config=CONFIG) as pool,
    ):
        pool.start()
        load = Load(pool, rate=60)
        load.wait_for(30)
        for n in range(5):  # the first deaths import and allocate what later ones use again
            kill(pool, n % 2)
        before, kills = footprint(pool), []
        began = time.monotonic()
        for n in range(rounds):
            kills.append((n % 2, *kill(pool, n % 2)))
        took, after = time.monotonic() - began, footprint(pool)
        codes = load.stop()
        print(
            f"| {rounds} kills and restarts | in {took:.0f} s; requests {codes.total()}, lost {codes.total() - codes['ok']} |"
        )
        for key in before:
            print(f"| supervisor {key}, before and after | {before[key]} and {after[key]} |")
        lost = {(r["worker"], r["incarnation"]): r for r in pool.records("worker_lost")}
        exited = {(r["worker"], r["incarnation"]): r for r in pool.records("worker_exited")}
        seen = [1e3 * (exited[slot, inc]["time"] - at) for slot, inc, at in kills]
        back = [1e3 * (r["time"] - at) for slot, inc, at in kills if (r := lost.get((slot, inc))) and r["returned"]]
        print(
            f"| death to its report by the supervisor | p50 {median(seen):.1f} ms, max {max(seen):.1f} ms, {len(seen)} deaths |"
        )
        print(
            f"| death to requests back in the router | p50 {median(back):.1f} ms, max {max(back):.1f} ms, {len(back)} deaths |"
        )
        return codes.total() == codes["ok"]


def kill(pool: RunningPool, slot: int) -> tuple[int, float]:
    """Kill a worker and wait for the next; return the incarnation and the instant (wall clock)."""
    worker = pool.worker(slot)
    at = time.time()
    os.kill(worker["pid"], signal.SIGKILL)
    pool.wait_for_incarnation(slot, worker["incarnation"] + 1)
    pool.wait(lambda s: s["pool"]["workers_ready"] == 2)
    return worker["incarnation"], at


def footprint(pool: RunningPool) -> dict[str, Any]:
    """What the supervisor holds."""
    process = psutil.Process(pool.pid)
    with process.oneshot():
        return {
            "threads": process.num_threads(),
            "descriptors": process.num_fds(),
            "children": len(process.children()),
            "RSS, MiB": round(process.memory_info().rss / 2**20, 1),
            "own memory, MiB": round(process.memory_full_info().uss / 2**20, 1),
        }


if __name__ == "__main__":
    sys.exit(main())
