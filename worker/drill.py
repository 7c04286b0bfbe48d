"""Hang on order, as a model does whose forward never returns: the drill that shows what the pool makes of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NoReturn

from .record import Record


def hang(record: Record, tickets: Sequence[int], timeout_s: float) -> NoReturn:
    """Enter a batch with these requests (none: an idle worker) and never leave it. Its deadline stands on the board as for any other."""
    record.running(tickets, timeout_s)
    while True:
        threading.Event().wait()
