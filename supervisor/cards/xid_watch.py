"""Waits for NVML's XID events in a thread of its own, and tells each by a callback.

The wait has a short limit, so that the set of cards can be renewed; an error is followed by a growing pause and a new set, since a card
that is lost makes the wait for all of them fail at once, again and again. NVML does not report every XID: the kernel log is the other ear.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from .card_reader import CardReader

_WAIT_MS: Final = 200
#: Pauses after errors in a row double up to the last.
_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 30.0
#: How long the thread may take to end; one that hangs in the driver does not.
_JOIN_S: Final = 2.0
#: No XID, but the timeout that NVML reports as an error.
_TIMEOUT: Final = 10
#: Events that a set may still hold when it is let go of.
_MAX_LEFT: Final = 64


class XidWatch:
    """The thread. `on_xid` gets the device's UUID and the number, `on_error` what interrupts the waiting."""

    def __init__(
        self, nvml: Any, reader: CardReader, on_xid: Callable[[str, int], None], on_error: Callable[[str], None]
    ) -> None:
        self._nvml, self._reader, self._on_xid, self._on_error = nvml, reader, on_xid, on_error
        self._stopping, self._poke = False, threading.Event()
        self._uuids: dict[Any, str] = {}
        self._thread = threading.Thread(target=self._run, name="xid-watch", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Watch the cards that answer now."""
        self._poke.set()

    def close(self) -> bool:
        """Stop; False if the thread hangs in the driver."""
        self._stopping = True
        self._poke.set()
        self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        last: Any = None  # the set before: let go of only when its successor listens, so that no event falls between the two
        while True:
            self._poke.clear()
            if self._stopping:
                return self._let_go(last)
            worked = False
            try:
                events, cards = self._listen()
                self._let_go(last)
                last = events
                self._wait(events, cards)
                worked = cards > 0
            except self._nvml.NVMLError as e:
                self._on_error(str(e))
            self._poke.wait(pause)
            pause = _FIRST_PAUSE_S if worked else min(pause * 2, _LAST_PAUSE_S)

    def _listen(self) -> tuple[Any, int]:
        """Make a set of all cards that answer; return it and how many those are."""
        events = self._nvml.nvmlEventSetCreate()
        return events, sum(self._register(uuid, handle, events) for uuid, handle in self._reader.cards())

    def _wait(self, events: Any, cards: int) -> None:
        """Tell of events until the set has to be made anew."""
        n = self._nvml
        while cards and not self._poke.is_set():
            began = time.monotonic()
            try:
                event = n.nvmlEventSetWait_v2(events, _WAIT_MS)
            except n.NVMLError as e:
                if e.value != _TIMEOUT:
                    raise
                if time.monotonic() - began < _WAIT_MS / 2000:  # a driver that does not wait must not make us spin
                    self._poke.wait(_WAIT_MS / 1000)
            else:
                self._tell(event)

    def _let_go(self, events: Any) -> None:
        """Tell what a set still holds, and free it. What its successor heard too is told twice, which harms nobody."""
        if events is None:
            return
        n = self._nvml
        with suppress(n.NVMLError):  # TIMEOUT when it is empty
            for _ in range(_MAX_LEFT):
                self._tell(n.nvmlEventSetWait_v2(events, 0))
        with suppress(n.NVMLError):
            n.nvmlEventSetFree(events)

    def _register(self, uuid: str, handle: Any, events: Any) -> bool:
        n = self._nvml
        try:
            wanted = n.nvmlEventTypeXidCriticalError & n.nvmlDeviceGetSupportedEventTypes(handle)
            if wanted:
                n.nvmlDeviceRegisterEvents(handle, wanted, events)
        except n.NVMLError as e:
            self._on_error(f"{uuid}: {e}")
            return False
        self._uuids[_address(handle)] = uuid
        return bool(wanted)

    def _tell(self, event: Any) -> None:
        if event.eventType != self._nvml.nvmlEventTypeXidCriticalError:
            return
        uuid = self._uuids.get(_address(event.device))
        if uuid is not None:
            self._on_xid(self._reader.named(uuid, event.gpuInstanceId), int(event.eventData))


def _address(handle: Any) -> Any:
    """The pointer that a handle is: two handles of one card are two Python objects."""
    return ctypes.cast(handle, ctypes.c_void_p).value
