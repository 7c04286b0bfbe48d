"""This worker's record on the board, in the words of its trade. Instants are CLOCK_MONOTONIC nanoseconds.

Every method is a few single-word stores. The work loop and the link share the queue word; they write it under the backlog's lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpupool.board import Board, Phase, SlotWord, pack_queue

from .faults import FaultKind

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_STATM: Final = Path("/proc/self/statm")


class Record:
    """The writer of one slot."""

    def __init__(self, board: Board, slot: int) -> None:
        self._board = board
        self._slot = slot
        self._sequence = 0
        self._progress = 0
        self._batches = 0
        self._samples = 0
        self._limits = (0, 0.0)  # that the board shows

    def _set(self, word: SlotWord, value: int) -> None:
        self._board.set_slot(self._slot, word, value)

    def phase(self, phase: Phase, timeout_s: float | None = None) -> None:
        """Enter a phase; `timeout_s` from now progress must have come."""
        now = time.monotonic_ns()
        deadline = 0 if timeout_s is None else now + int(timeout_s * 1e9)
        # No deadline stands while the phase changes: a reader must never see an old deadline in a new phase.
        self._set(SlotWord.PHASE_DEADLINE_NS, 0)
        self._set(SlotWord.PHASE, phase)
        self._set(SlotWord.PHASE_SINCE_NS, now)
        self._set(SlotWord.PHASE_DEADLINE_NS, deadline)

    def progress(self) -> None:
        """Tell that the work moves."""
        self._progress += 1
        self._set(SlotWord.PROGRESS, self._progress)

    def running(self, tickets: Sequence[int], timeout_s: float) -> None:
        """Name the requests that forward is about to run for, and give it its time. Each try of a split batch is named anew."""
        self._board.set_running(self._slot, tickets)
        self.progress()
        self.phase(Phase.BATCH, timeout_s)

    def beside(self, ticket: int, lane: int = 0) -> None:
        """Name the request whose pre- or postprocessing is about to run beside the batch, 0 when that is over; each thread has its lane."""
        self._board.set_beside(self._slot, lane, ticket)

    def idle(self) -> None:
        """No batch runs; its results are queued to be sent.

        Should the process die before they are sent, nobody is suspect of it: the requests are simply run again.
        """
        self.progress()
        self.phase(Phase.IDLE)
        self._board.set_running(self._slot, ())

    def ran(self, samples: int) -> None:
        """Count a batch that has run."""
        self._batches += 1
        self._samples += samples
        self._set(SlotWord.BATCHES, self._batches)
        self._set(SlotWord.SAMPLES, self._samples)

    def service(self, per_sample_s: float, full_row_s: float) -> None:
        """Publish what a sample takes of late, and what one in a full batch would; 0 while unknown.

        Per sample, so that the word says the same whatever BATCH_LIMIT has become since: the two are not written in one store.
        """
        self._set(SlotWord.SERVICE_NS, max(1, int(per_sample_s * 1e9)) if per_sample_s else 0)
        self._set(SlotWord.FULL_ROW_NS, max(1, int(full_row_s * 1e9)) if full_row_s else 0)

    def queue(self, running: int, queued: int) -> None:
        """Publish samples running and queued."""
        self._sequence += 1
        self._set(SlotWord.QUEUE, pack_queue(self._sequence, running, queued))

    def limits(self, batch_limit: int, window_s: float) -> None:
        """Publish the limits in force; asked to after each batch, it writes what is new."""
        if (batch_limit, window_s) == self._limits:
            return
        self._limits = batch_limit, window_s
        self._set(SlotWord.BATCH_LIMIT, batch_limit)
        self._set(SlotWord.WINDOW_NS, int(window_s * 1e9))

    def set_shares(self) -> tuple[float, float]:
        """Return the shares of the configured batch and window that the supervisor wants used."""
        batch = self._board.get_slot(self._slot, SlotWord.SET_BATCH_PPM)
        window = self._board.get_slot(self._slot, SlotWord.SET_WINDOW_PPM)
        return batch / 1e6 if batch else 1.0, window / 1e6 if window else 1.0

    def error(self, kind: FaultKind) -> None:
        """Remember the last kind of fault."""
        self._set(SlotWord.LAST_ERROR, kind)

    def registered(self, epoch: int) -> None:
        """Tell which router this worker belongs to; 0: none."""
        self._set(SlotWord.ROUTER_EPOCH, epoch)

    def beat(self) -> None:
        """Tell that the interpreter lives, and what memory it holds."""
        self._set(SlotWord.BEAT_NS, time.monotonic_ns())
        try:
            resident = int(_STATM.read_bytes().split()[1]) * _PAGE
        except (OSError, ValueError, IndexError):  # no /proc, or no descriptor left: the beat counts, the figure does not
            return
        self._set(SlotWord.MEMORY_BYTES, resident)
