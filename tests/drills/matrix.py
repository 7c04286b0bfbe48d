"""The faults times the moments, each tried on a real pool under load and measured from the pool's own log.

One pool serves all cells. A cell brings worker 0 into its moment, does the fault, waits until both workers are ready again, and reads from
the log: when the pool learned of it (first `worker_late`, `worker_stuck` or `worker_exited` of that process), what died besides, and
when the next process was ready. Requests that were not answered `ok` are lost; so are those that got no reply.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.running import HERE, Load, RunningPool, until

#: Small limits, so that what has to be waited for is short. Starts are not delayed: that is the restart policy's own test. In turn, so that
#: every worker gets batches to be hit in, whatever the router has learned of its speed.
CONFIG: Final = """
[supervision]
heartbeat_interval_s = 0.1
heartbeat_timeout_s = 1.0
batch_timeout_s = 2.0
load_timeout_s = 5.0
stop_timeout_s = 2.0
restart_delays_s = [0.0]
max_restarts = 1000
[router]
policy = "round_robin"
"""
MOMENTS: Final = ("idle", "loading", "in a batch")
#: The longest that any fault may take to be over, on a machine that does other things too.
PATIENCE_S: Final = 40.0
#: Long enough to be hit in it, shorter than every limit.
_MOMENT_S: Final = 1.5


@dataclass(frozen=True, slots=True)
class Fault:
    """One row: from outside by `signal`, or from inside by `order` to the model. `deadly`: whether it is to end the process at all."""

    name: str
    moments: tuple[str, ...]
    signal: str = ""
    order: str = ""
    seconds: float = 0.0
    deadly: bool = True
    at: str = ""  # import: not in load, but before; first: not in some batch, but in the first of a new process


FAULTS: Final = (
    Fault("SIGKILL", MOMENTS, signal="SIGKILL"),
    Fault("SIGSTOP", MOMENTS, signal="SIGSTOP"),
    Fault("SIGSEGV", MOMENTS, signal="SIGSEGV"),
    Fault("exit 0", MOMENTS, order="exit"),
    Fault("hang in Python", MOMENTS[1:], order="hang"),
    Fault("hang in C, interpreter lock held", MOMENTS, order="hang_locked"),
    Fault("hang in C, lock free", MOMENTS[1:], order="hang_unlocked"),
    Fault("error at import", ("loading",), order="raise", at="import"),
    Fault("error at load", ("loading",), order="raise"),
    Fault("death at first batch", ("in a batch",), order="segv", at="first"),
    Fault("no fault: busy 1.8 s, lock held", MOMENTS, order="busy_locked", seconds=1.8, deadly=False),
)
OOM: Final = Fault("OOM kill, by the kernel", MOMENTS, order="fill")


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured. Seconds from the fault; None when it did not come."""

    detected_s: float | None
    lost: int
    wrong_kills: int
    back_s: float | None
    sent: int
    cause: str = ""

    def text(self, fault: Fault) -> str:
        """One cell of the table."""
        if not fault.deadly:
            return f"not killed, lost {self.lost}, wrong {self.wrong_kills}"
        return f"{_s(self.detected_s)}, lost {self.lost}, wrong {self.wrong_kills}, back {_s(self.back_s)}"


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.3f} s" if seconds < 0.1 else f"{seconds:.2f} s"


class Ground:
    """The pool that all cells are tried on."""

    def __init__(self, folder: Path, make: Callable[..., RunningPool] = RunningPool) -> None:
        self.orders = folder / "orders"
        self.orders.mkdir(parents=True)
        self.pool = make(folder, "Faulty", config=CONFIG, env={"ORDERS": str(self.orders)})
        self.pool.file.write_text(self.pool.file.read_text().replace("toy_models:", "faulty_model:"))
        assert (HERE / "faulty_model.py").exists()
        self.pool.start()

    def order(self, moment: str, do: str, seconds: float = 0.0) -> None:
        """Leave an order for the model."""
        ready = self.orders / f"{moment}.new"
        ready.write_text(json.dumps({"do": do, "s": seconds}))
        ready.rename(self.orders / moment)

    def obeyed(self, seen: int) -> dict[str, Any]:
        """Wait until the model has taken an order that is not among those seen."""
        for _ in until(15.0, every=0.005):
            if len(notes := self.pool.notes("fault")) > seen:
                return notes[-1]
        raise AssertionError(f"no order was taken: {list(self.orders.iterdir())}; {self.pool.text()[-1500:]}")

    def both_ready(self) -> dict[str, Any]:
        """Wait until both workers take work."""
        return self.pool.wait(lambda s: s["pool"]["workers_ready"] == 2, within=PATIENCE_S)

    def measure(self, fault: Fault, moment: str, *, rate: float = 50.0) -> Cell:
        """Try one cell."""
        pool = self.pool
        before = self.both_ready()["workers"][0]
        start = len(pool.text().splitlines())
        load = Load(pool, rate=rate)
        try:
            load.wait_for(10)
            at, incarnation = self._strike(fault, moment, before)
            if fault.deadly:
                pool.wait_for_incarnation(0, incarnation + 1)
            else:
                load.wait_for(int(rate * (fault.seconds + 1.0)), within=PATIENCE_S)
            self.both_ready()
            load.wait_for(10)
        finally:
            codes = load.stop()
        return self._read(fault, start, at, incarnation, codes.total() - codes["ok"], codes.total())

    def _strike(self, fault: Fault, moment: str, before: dict[str, Any]) -> tuple[float, int]:
        """Do the fault; return its instant (wall clock) and the incarnation that it hits."""
        seen = len(self.pool.notes("fault"))
        incarnation, where = before["incarnation"], f"{before['pid']}.now"
        anew = moment == "loading" or fault.at == "first"
        if anew:
            incarnation, where = incarnation + 1, fault.at or "load"
        elif moment == "in a batch":
            where = f"{before['pid']}.forward"
        if fault.order:
            self.order(where, fault.order, fault.seconds)
        elif moment != "idle":
            self.order(where, "sleep", _MOMENT_S)
        if anew:
            assert self.pool.ask("restart", workers=["0"])["ok"]
        if fault.order or moment != "idle":
            note = self.obeyed(seen)
            if fault.order:
                return note["at"], incarnation
        pid = note["pid"] if moment != "idle" else before["pid"]
        at = time.time()
        os.kill(pid, signal.Signals[fault.signal])
        return at, incarnation

    def _read(self, fault: Fault, start: int, at: float, incarnation: int, lost: int, sent: int) -> Cell:
        records = [json.loads(line) for line in self.pool.text().splitlines()[start:]]
        detected = back = None
        wrong, cause = 0, ""
        for r in records:
            mine = r.get("worker") == 0 and r.get("component") == "supervisor"
            match r["event"]:
                case "worker_late" | "worker_stuck" if mine and detected is None:
                    detected = r["time"] - at
                case "worker_exited" if mine and r["incarnation"] == incarnation and fault.deadly:
                    detected = r["time"] - at if detected is None else detected
                    cause = r["cause"]
                case "worker_exited" | "router_exited":
                    wrong += 1
                case "worker_ready" if mine and r["time"] > at and back is None and fault.deadly:
                    back = r["time"] - at
        return Cell(detected, lost, wrong, back, sent, cause)
