"""The side thread: tells that the interpreter lives, and looks after what the work loop is too busy to see.

It needs nothing but the interpreter's lock. A model that keeps that lock silences it, which is why a missed beat alone kills nobody.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from gpupool.board import Board, Word
from gpupool.exits import Exit
from gpupool.logs import LEVELS, Log

from .record import Record

_LEVELS: Final = frozenset(LEVELS.values())


class Beat:
    """Beats every `interval_s`, and with each beat looks for a new log level, a new router, a lost parent and a stuck link.

    Args:
        epoch_changed: called when another router has become the present one.
        link_busy_since: monotonic seconds since when the link thread has been at one piece of work, 0 when it waits.
        link_timeout_s: how long one piece of its work (a preprocess, a postprocess) may take.
    """

    def __init__(
        self,
        board: Board,
        record: Record,
        log: Log,
        *,
        interval_s: float,
        epoch_changed: Callable[[], None],
        link_busy_since: Callable[[], float],
        link_timeout_s: float,
    ) -> None:
        self._board = board
        self._record = record
        self._log = log
        self._interval_s = interval_s
        self._epoch_changed = epoch_changed
        self._link_busy_since = link_busy_since
        self._link_timeout_s = link_timeout_s
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
        level = self._board.get(Word.LOG_LEVEL)
        if level != self._level:
            self._level = level
            if level in _LEVELS:  # 0 means: as in the spec
                self._log.set_level(level)
        since = self._link_busy_since()
        if since and time.monotonic() - since > self._link_timeout_s:
            # The work loop's phase cannot show this: the model runs, but nothing comes in or goes out any more.
            self._log.event.error("link_stuck", busy_s=round(time.monotonic() - since, 1))
            faulthandler.dump_traceback(all_threads=True)
            self._log.close()
            os._exit(Exit.REPLACE_ME)
