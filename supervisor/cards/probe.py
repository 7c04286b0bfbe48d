"""`python -m gpupool.supervisor.cards.probe`: the one process that talks to NVML while the pool runs; it may hang, and it may be killed.

Started by the supervisor like any child. Its first message is its spec: {devices, interval_s, kernel_log, leave, log}, where `leave` names
devices that must not be asked for some seconds. What it says:

| message | when |
| --- | --- |
| up {driver, nvml, kernel_log} | NVML was opened; whether the kernel log can be read too |
| readings {cards} | every interval, and at once after an XID; empty while there is no NVML: a sign of life |
| xid {uuid, xid, source, text, pid} | at once; source is "nvml" or "kernel"; text and pid come from the kernel only |
| stuck {uuid, call} | a driver call takes suspiciously long: the last words of a probe that hangs |
| no_nvml {reason, code} | once for each new reason; it then tries again every minute |

What it is told: leave {uuid, seconds}; stop {}. It exits 0 on `stop` and when the supervisor is gone.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gpupool import child, logs
from gpupool.channel import Channel, Message
from gpupool.exits import Exit
from gpupool.spec import LogSpec

from .card_reader import CardReader, text
from .kernel_log import KMSG, KernelLog
from .reading import CardReading
from .xid import KernelXid
from .xid_watch import XidWatch

#: A card that does not answer may be back on the bus, and a driver may have been loaded: only a new start of NVML shows that.
_REOPEN_S: Final = 60.0
#: A call about a card that takes so long probably never ends; opening NVML wakes all cards and may take longer.
_STUCK_S: Final = 3.0
_STUCK_OPENING_S: Final = 20.0
#: Between an XID and the reading that it brings forward: XIDs come in storms.
_GAP_S: Final = 0.1
#: XIDs that wait while the supervisor does not read.
_MAX_LATE: Final = 256
_MAX_TEXT: Final = 500


class Speaker:
    """The channel, shared by threads. What must not be lost waits for the next chance to send."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._late: deque[Message] = deque(maxlen=_MAX_LATE)

    def say(self, message: Message, *, keep: bool = True) -> None:
        """Send, after what waits. `keep`: worth sending later if it cannot be sent now."""
        with self._lock:
            self._late.append(message)
            while self._late:
                if not self._channel.send(self._late[0]):
                    if not keep:
                        self._late.pop()
                    return
                self._late.popleft()


class Probe:
    """The process. The main thread asks the cards; others wait for events, follow the kernel log and watch for a hang."""

    def __init__(self, channel: Channel, spec: Message, log: logs.Log) -> None:
        self._channel, self._log = channel, log
        self._speaker = Speaker(channel)
        self._devices: list[str] = list(spec["devices"])
        self._interval_s: float = spec["interval_s"]
        now = time.monotonic()
        self._leave: dict[str, float] = {uuid: now + seconds for uuid, seconds in spec.get("leave", {}).items()}
        self._nvml: Any = None
        self._reader: CardReader | None = None
        self._watch: XidWatch | None = None
        self._no_nvml = ""
        self._reopen_s: float = spec.get("reopen_s", _REOPEN_S)
        self._opened_at = float("-inf")
        self._watch_error = ""
        self._answering: frozenset[str] = frozenset()
        self._asking: tuple[str | None, str, float] = (None, "", now)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._kernel_log = self._follow_kernel(Path(spec.get("kernel_log_path", KMSG))) if spec.get("kernel_log") else None
        threading.Thread(target=self._guard, name="guard", daemon=True).start()

    def run(self) -> int:
        """Read until told to stop."""
        due = time.monotonic()
        while True:
            if self._reader is None and time.monotonic() >= self._opened_at + self._reopen_s:
                self._open()
            cards = [self._read(uuid) for uuid in self._devices] if self._reader else []
            self._speaker.say({"t": "readings", "cards": [c.to_message() for c in cards]}, keep=False)
            self._follow_up(cards)
            now = time.monotonic()
            due = max(due + self._interval_s, now)
            if not self._wait(due - now):
                return Exit.OK

    # NVML.

    def _open(self) -> None:
        self._opened_at = time.monotonic()
        self._enter(None, "nvmlInit")
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError as e:
            self._without_nvml(f"nvidia-ml-py cannot be imported: {e}", None)
            return
        except pynvml.NVMLError as e:
            self._without_nvml(f"NVML: {e}", int(e.value))
            return
        finally:
            self._enter(None, "")
        self._nvml, self._no_nvml = pynvml, ""
        self._reader = CardReader(pynvml, self._devices, self._enter)
        self._speaker.say({
            "t": "up", "driver": self._version("nvmlSystemGetDriverVersion"), "nvml": self._version("nvmlSystemGetNVMLVersion"),
            "kernel_log": self._kernel_log is not None,
        })  # fmt: skip

    def _close(self) -> None:
        """Let go of NVML, to open it anew."""
        if self._watch and not self._watch.close():
            self._log.event.error("probe_hangs", call="nvmlEventSetWait")
            os._exit(Exit.FAILED)  # NVML cannot be closed under a call that hangs; a new process can open it
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
        self._reader = self._watch = None

    def _without_nvml(self, reason: str, code: int | None) -> None:
        if reason != self._no_nvml:
            self._no_nvml = reason
            self._log.event.warning("no_nvml", reason=reason, code=code)
            self._speaker.say({"t": "no_nvml", "reason": reason[:_MAX_TEXT], "code": code})

    def _read(self, uuid: str) -> CardReading:
        assert self._reader is not None
        if self._is_left_alone(uuid):
            return CardReading(uuid, uuid, error="left alone: the driver hangs on it")
        return self._reader.read(uuid)

    def _is_left_alone(self, uuid: str) -> bool:
        return self._leave.get(uuid, 0.0) > time.monotonic()

    def _follow_up(self, cards: list[CardReading]) -> None:
        """Watch the cards that answer now; open NVML anew from time to time while one does not."""
        if self._reader is None:
            return
        answering = frozenset(c.uuid for c in cards if not c.error)
        if self._watch is None:  # after the first reading: it names the cards that events are about
            self._watch = XidWatch(self._nvml, self._reader, self._on_event, self._on_watch_error)
            self._answering = answering  # it begins with them
        if answering != self._answering:
            self._answering = answering
            self._watch.renew()
        missing = any(c.error and not self._is_left_alone(c.uuid) for c in cards)
        if missing and time.monotonic() >= self._opened_at + self._reopen_s:
            self._close()
            self._opened_at = float("-inf")

    def _version(self, call: str) -> str | None:
        try:
            return str(text(getattr(self._nvml, call)()))
        except (self._nvml.NVMLError, UnicodeDecodeError):
            return None

    # What the other threads bring.

    def _on_event(self, uuid: str, xid: int) -> None:
        self._tell_xid(uuid, xid, "nvml", "", None)

    def _on_watch_error(self, reason: str) -> None:
        if reason != self._watch_error:  # it may come again every half minute for ever
            self._watch_error = reason
            self._log.event.warning("xid_events_interrupted", reason=reason)

    def _on_kernel(self, fault: KernelXid) -> None:
        if (reader := self._reader) and (card := reader.at_bus(fault.bus)):
            self._tell_xid(reader.named(card, fault.instance), fault.xid, "kernel", fault.text, fault.pid)

    def _tell_xid(self, uuid: str, xid: int, source: str, line: str, pid: int | None) -> None:
        self._watch_error = ""
        self._log.event.warning("xid", device=uuid, xid=xid, source=source, line=line)
        self._speaker.say({"t": "xid", "uuid": uuid, "xid": xid, "source": source, "text": line[:_MAX_TEXT], "pid": pid})
        with suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)  # the recovery action may have changed with it

    def _follow_kernel(self, path: Path) -> KernelLog | None:
        try:
            return KernelLog(self._on_kernel, path)
        except OSError as e:
            self._log.event.warning("kernel_log_unreadable", reason=str(e))
            return None

    def _enter(self, uuid: str | None, call: str) -> None:
        self._asking = (uuid, call, time.monotonic())

    def _guard(self) -> None:
        """Say which call hangs while there is still somebody to say it."""
        told: tuple[str | None, str, float] | None = None
        while True:
            time.sleep(_STUCK_S / 6)
            uuid, call, since = asking = self._asking
            limit_s = _STUCK_S if uuid else _STUCK_OPENING_S
            if call and asking != told and time.monotonic() > since + limit_s:
                told = asking
                self._speaker.say({"t": "stuck", "uuid": uuid, "call": call})

    # What it is told.

    def _wait(self, seconds: float) -> bool:
        """Wait for the next reading, or for what brings it forward; False when it is time to go."""
        watched: list[Any] = [self._channel, self._wake]
        ready = select.select(watched, [], [], seconds)[0]
        if self._wake in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            time.sleep(_GAP_S)
        if self._channel not in ready:
            return True
        try:
            message = self._channel.receive()
        except EOFError:
            return False
        match message:
            case {"t": "leave", "uuid": str(uuid), "seconds": float() | int() as seconds}:
                self._leave[uuid] = time.monotonic() + seconds
            case {"t": "stop"}:
                return False
        return True


def main() -> int:
    """Take up what was inherited, and serve."""
    life_fd = os.environ.get(child.ENV_LIFE)
    given = child.attach()
    if life_fd:
        # It proves to the next supervisor that nobody holds a card or a socket any more. A probe holds neither, and if the driver
        # never lets go of it, that shall not keep a pool from starting.
        os.close(int(life_fd))
    log = logs.configure("probe", LogSpec(**given.spec["log"]))
    code = Probe(given.channel, given.spec, log).run()
    log.close()
    return code


if __name__ == "__main__":
    # Not sys.exit: a thread that hangs in the driver must not be waited for, nor NVML's own exit hooks be run.
    status = main()
    sys.stdout.flush()
    os._exit(status)
