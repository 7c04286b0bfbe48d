"""The side thread: tells that the interpreter lives, and looks after what the work loop is too busy to see.

It needs nothing but the interpreter's lock. A model that keeps that lock silences it, which is why a missed beat alone kills nobody.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from gpupool.board import Board, Word
from gpupool.exits import Exit
from gpupool.logs import LEVELS, Log

from .record import Record

_LEVELS: Final = frozenset(LEVELS.values())


class Beat:
    """Beats every `interval_s`, and with each beat looks for a new log level, a new router, a lost parent and a stuck thread.

    Args:
        epoch_changed: called when another router has become the present one.
        busy_since: monotonic seconds since when each thread beside the work loop has been at one piece of work, by name; 0 when it waits.
        piece_timeout_s: how long one piece of it (a preprocess, a postprocess) may take.
    """

    def __init__(
        self,
        board: Board,
        record: Record,
        log: Log,
        *,
        slot: int,
        interval_s: float,
        epoch_changed: Callable[[], None],
        busy_since: Callable[[], Mapping[str, float]],
        piece_timeout_s: float,
    ) -> None:
        self._board = board
        self._slot = slot
        self._record = record
        self._log = log
        self._interval_s = interval_s
        self._epoch_changed = epoch_changed
        self._busy_since = busy_since
        self._piece_timeout_s = piece_timeout_s
        #: Called with every beat.
        self.each_time: Callable[[], None] = lambda: None
        self._parent = os.getppid()
        self._epoch = board.get(Word.ROUTER_EPOCH)
        self._level = 0
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        """Begin; the first beat comes at once."""
        self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            if os.getppid() != self._parent:
                os._exit(Exit.PARENT_GONE)
            self._record.beat()
            try:
                self._look()
                self.each_time()
            except Exception as e:  # short of memory, perhaps: a beat that ended would end the worker
                with contextlib.suppress(Exception):
                    self._log.event.error("beat_disturbed", exc_info=e)
            pause.wait(self._interval_s)

    def _look(self) -> None:
        epoch = self._board.get(Word.ROUTER_EPOCH)
        if epoch != self._epoch:
            self._epoch = epoch
            self._epoch_changed()
        level = self._board.log_level(self._slot)
        if level != self._level:
            self._level = level
            if level in _LEVELS:  # 0 means: as in the spec
                self._log.set_level(level)
        now = time.monotonic()
        for thread, since in self._busy_since().items():
            if since and now - since > self._piece_timeout_s:
                # The work loop's phase cannot show this: the model runs, but something no longer comes in or goes out.
                self._log.event.error("thread_stuck", thread=thread, busy_s=round(now - since, 1))
                faulthandler.dump_traceback(all_threads=True)
                self._log.close()
                os._exit(Exit.REPLACE_ME)
