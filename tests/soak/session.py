"""One soak: a pool, clients of all kinds in processes of their own, disturbances, and the verdict on what came of it."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from soak.disturb import Disturber
from soak.ledger import Ledger
from soak.watch import Memory, Watch
from support.running import RunningPool, until

WORKERS: Final = 3
#: No delay before a restart, and never parked: what is to be seen is the work, not the restart policy.
CONFIG: Final = """
[supervision]
heartbeat_interval_s = 0.1
heartbeat_timeout_s = 1.0
batch_timeout_s = 3.0
load_timeout_s = 30.0
stop_timeout_s = 2.0
restart_delays_s = [0.0]
max_restarts = 100000
[batching]
max_batch = 16
[router]
policy = "shortest_wait"
max_pending = 300
max_pending_bytes = 67108864
"""
#: Clients that must come out even, how many processes of each.
KINDS: Final = {"dealer": 2, "req": 1, "client": 1, "async": 1, "large": 1, "flood": 1, "rubbish": 1}
#: What may be logged as an error while workers are killed and bad files reloaded.
EXPECTED_ERRORS: Final = frozenset({"worker_exited", "worker_stuck", "reload_refused", "request_poisoned"})
_LIBRARY: Final = ("client", "async")
#: What a client may take to hand in its ledger after its time, more than it waits for replies.
_PATIENCE_S: Final = 60.0


@dataclass
class Outcome:
    """All that was seen."""

    ledgers: dict[str, Ledger]
    disturbed: Counter[str]
    watch: Watch
    memory: dict[str, Memory]
    router: dict[str, Any]  # its books at the end
    killed_clients: int = 0
    violations: Counter[str] = field(default_factory=Counter)


def soak(folder: Path, *, seconds: float, seed: int, router_kills: bool = False) -> Outcome:
    """Run one. With `router_kills` only the library's callers are held to anything: a raw socket's requests die with a router."""
    pool = RunningPool(folder, "paced_model:Paced", workers=WORKERS, options="fixed_s = 0.004, each_s = 0.0005", config=CONFIG)
    violations: Counter[str] = Counter()
    kinds = {kind: KINDS[kind] for kind in _LIBRARY} if router_kills else KINDS
    try:
        pool.start()
        watch, disturber = Watch(pool), Disturber(pool, seed, router_kills=router_kills)
        watch.start()
        with (
            clients(pool, kinds, seed, seconds, strict=router_kills) as processes,
            doomed(pool, seed, seconds, mild=router_kills) as killed,
        ):
            disturber.start()
            ledgers = collect(processes, seconds, violations)
            disturber.stop()
        last = _at_rest(pool, violations)
        watch.stop()
        violations += watch.problems + disturber.problems
        violations += _end(pool)
    finally:
        pool.close()
    outcome = Outcome(ledgers, disturber.done, watch, watch.memory(), last, len(killed), violations)
    violations += _errors(pool, router_kills=router_kills)
    for kind, ledger in ledgers.items():
        violations += Counter({f"{kind}: {words}": count for words, count in ledger.violations.items()})
        if not ledger.codes["ok"]:
            violations[f"{kind}: not one request was answered ok"] += 1
    for name, memory in outcome.memory.items():
        if not memory.flat and not router_kills:
            violations[f"memory of the {name} went from {memory.middle:.1f} to {memory.last:.1f} MiB"] += 1
    return outcome


@contextmanager
def clients(
    pool: RunningPool, kinds: dict[str, int], seed: int, seconds: float, *, strict: bool
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the clients; each has its job on stdin already."""
    started: list[subprocess.Popen[str]] = []
    try:
        for number, kind in enumerate(kind for kind, count in kinds.items() for _ in range(count)):
            deadly = kind == "dealer" and number == 0
            started.append(start_client(pool, kind, seed * 1000 + number, seconds, deadly=deadly, strict=strict))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def start_client(
    pool: RunningPool, kind: str, seed: int, seconds: float, *, deadly: bool = False, strict: bool = False
) -> subprocess.Popen[str]:
    """Start one client."""
    job = {"kind": kind, "endpoint": f"tcp://127.0.0.1:{pool.port}", "seed": seed, "seconds": seconds}
    job |= {"deadly": deadly, "strict": strict}
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "soak.clients"],
        env={key: value for key, value in pool.env.items() if key != "TOY_LOG"} | {"PYTHONPATH": f"{root}:{root / 'tests'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    process.stdin.write(json.dumps(job))
    process.stdin.close()
    process.stdin = None
    return process


@contextmanager
def doomed(pool: RunningPool, seed: int, seconds: float, *, mild: bool) -> Iterator[list[int]]:
    """In the meantime start clients that are killed with requests open, and one that never reads; yields the pids of the killed.

    `mild`: without floods, so that nobody need be refused.
    """
    rng, ending, killed = random.Random(seed + 1), threading.Event(), list[int]()
    kinds = ("dealer", "large") if mild else ("dealer", "large", "flood")
    deaf = start_client(pool, "deaf", seed * 1000 + 500, seconds)

    def go_on() -> None:
        number = 600
        while not ending.is_set():
            number += 1
            process = start_client(pool, rng.choice(kinds), seed * 1000 + number, 60.0)
            ending.wait(rng.uniform(1.0, 4.0))
            process.send_signal(signal.SIGKILL)
            process.communicate()
            killed.append(process.pid)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ending.set()
        thread.join(10.0)
        deaf.kill()
        deaf.communicate()


def collect(processes: list[subprocess.Popen[str]], seconds: float, violations: Counter[str]) -> dict[str, Ledger]:
    """Wait for the clients' ledgers, and add them up by kind."""
    end = time.monotonic() + seconds + _PATIENCE_S
    ledgers: dict[str, Ledger] = {}
    for process in processes:
        try:
            text, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            ledger = Ledger.load(text.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as e:
            violations[f"a client has no ledger: {type(e).__name__}, exit code {process.poll()}"] += 1
            continue
        if ledger.kind in ledgers:
            ledgers[ledger.kind].merge(ledger)
        else:
            ledgers[ledger.kind] = ledger
    return ledgers


def _at_rest(pool: RunningPool, violations: Counter[str]) -> dict[str, Any]:
    """Wait until the pool is whole again and has nothing left to do; return the router's books."""
    document: dict[str, Any] = {}
    for _ in until(60.0, every=0.1):
        with contextlib.suppress(OSError, ValueError, KeyError):
            document = pool.status()
            router = document["router"]
            if document["pool"]["workers_ready"] == WORKERS and not router["pending"] and not router["in_flight"]:
                return dict(router)
    states = [worker["state"] for worker in document.get("workers", [])]
    violations[f"the pool did not come to rest: workers {states}, {document.get('router')}"] += 1
    return dict(document.get("router", {}))


def _end(pool: RunningPool) -> Counter[str]:
    """Stop the pool as systemd would; nothing of it may be left."""
    assert pool.process
    pool.process.terminate()
    try:
        code = pool.process.wait(30)
    except subprocess.TimeoutExpired:
        return Counter(["the pool did not stop within 30 s"])
    found = Counter([f"the pool's exit code was {code}"] if code else [])
    for _ in until(5.0, every=0.1):
        if not (left := pool.pids()):
            return found
    return found + Counter([f"processes were left over: {left}"])


def _errors(pool: RunningPool, *, router_kills: bool) -> Counter[str]:
    """Errors and tracebacks in the log that no disturbance explains."""
    found: Counter[str] = Counter()
    expected = EXPECTED_ERRORS | ({"router_exited"} if router_kills else set())
    for line in pool.text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            found[f"a log line is not JSON: {line[:100]}"] += 1
            continue
        if record["level"] == "error" and record["event"] not in expected:
            found[f"logged as an error: {record['event']} {str(record.get('error') or record.get('reason') or '')[:200]}"] += 1
        elif "traceback" in record or "Traceback" in str(record.get("line", "")):
            found[f"a traceback in {record['event']} of {record['component']}"] += 1
    return found
