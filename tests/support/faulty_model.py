"""A model that goes wrong when it is told to, by order files in the folder $ORDERS: `import`, `load`, `first`, `PID.now`, `PID.forward`.

An order is JSON: `do`, and `s` for those that take time. It is obeyed once; the instant just before the fault is noted by `at` in $TOY_LOG,
wall clock, so that it can be set beside the pool's log.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORDERS = Path(os.environ["ORDERS"])
#: Each second: how often the thread that waits for `now` looks.
_LOOKS = 50


def obey(moment: str) -> None:
    """Carry out the order for this moment, if there is one."""
    file, mine = ORDERS / moment, ORDERS / f"{moment}.taken"
    try:
        file.rename(mine)  # one taker only
    except FileNotFoundError:
        return
    order = json.loads(mine.read_text())
    with open(os.environ["TOY_LOG"], "a") as log:
        log.write(json.dumps({"event": "fault", "pid": os.getpid(), "moment": moment, "at": time.time(), **order}) + "\n")
    DO[order["do"]](float(order.get("s", 0.0)))


def spin(seconds: float) -> None:
    """Compute in Python."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def fail(_: float) -> None:
    """Raise."""
    raise RuntimeError("told to fail")


def fill(_: float) -> None:
    """Take all memory there is, page by page."""
    held = []
    while True:
        held.append(b"x" * (8 << 20))


DO: dict[str, Callable[[float], Any]] = {
    "sleep": time.sleep,
    "spin": spin,
    "raise": fail,
    "exit": lambda _: os._exit(0),
    "segv": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda _: threading.Event().wait(),
    # A C call through PyDLL keeps the interpreter's lock: no other thread of the process moves.
    "hang_locked": lambda _: ctypes.PyDLL(None).sleep(3600),
    "hang_unlocked": lambda _: ctypes.CDLL(None).sleep(3600),
    "busy_locked": lambda s: ctypes.PyDLL(None).usleep(int(s * 1e6)),
    "fill": fill,
}

obey("import")


class Faulty:
    """Returns its samples, unless ordered otherwise."""

    def load(self, context: Any) -> None:
        obey("load")
        self._ran = False
        threading.Thread(target=self._look, daemon=True).start()

    def forward(self, batch: list[Any]) -> Any:
        if not self._ran:
            self._ran = True
            obey("first")
        obey(f"{os.getpid()}.forward")
        return batch

    def _look(self) -> None:
        while True:
            obey(f"{os.getpid()}.now")
            time.sleep(1 / _LOOKS)
