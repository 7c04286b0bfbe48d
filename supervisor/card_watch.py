"""The door between the cards and the pool: the probe's process, what it says, what card health makes of it, and the pool's events.

Only pools with GPUs have one. Nothing here decides: the probe's life stands in cards.probe_life, judgements in cards.health.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol, assert_never

from gpupool.logs import Log
from gpupool.spec import LogSpec

from . import events as ev
from .cards import verdicts as v
from .cards.health import CardHealth
from .cards.memory import MemoryReturn
from .cards.probe_life import KillProbe, ProbeCommand, ProbeLife, SpawnProbe
from .cards.reading import CardReading, reading_from
from .cards.xid import parse_kernel_line
from .devices import Device
from .kept import KeptCard
from .process import Child, Loop
from .state_file import boot_id

_INTERVAL_S: Final = 1.0
#: A device that an operator has is not asked until it is taken back; the probe wants a number.
_RELEASED_S: Final = 1e9
_MAX_LINE: Final = 4096


class StartChild(Protocol):
    """Starts a child process of the pool; see Children.start."""

    def __call__(
        self,
        module: str,
        environment: dict[str, str],
        *,
        on_exit: Callable[[Child], None],
        on_readable: Callable[[Child], None],
    ) -> Child:
        """Start it; raises OSError."""


class CardWatch:
    """The watch over a pool's cards.

    Args:
        devices: all of the pool, by slot.
        loop: to watch descriptors.
        feed: takes the pool's events.
        start_child: starts the probe.
        log_spec: how the probe logs.
        worker_pids: the processes that run now.
        xid_socket: where the kernel-log side-car writes, if it runs.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        loop: Loop,
        feed: Callable[[ev.Event], None],
        start_child: StartChild,
        log: Log,
        log_spec: Callable[[], LogSpec],
        worker_pids: Callable[[], list[int]],
        xid_socket: Path,
    ) -> None:
        self._slots = {d.id: n for n, d in enumerate(devices) if d.kind == "gpu"}
        self._devices, self._loop, self._feed, self._start_child = devices, loop, feed, start_child
        self._log, self._log_spec, self._worker_pids = log, log_spec, worker_pids
        now = time.monotonic()
        self.health = CardHealth(self._slots, boot_id=boot_id(), wall_offset_s=time.time() - now, now=now)
        self._life = ProbeLife()
        self._children: dict[int, Child] = {}  # by epoch; a killed one stays until it has really ended
        self._memory = MemoryReturn()
        self._released: set[str] = set()
        self._socket = _bind(xid_socket, log)
        if self._socket is not None:
            loop.add_reader(self._socket.fileno(), self._on_kernel_line, self._socket)

    def start(self, kept: dict[str, KeptCard]) -> None:
        """Take up what the last run knew, and start the probe."""
        now = time.monotonic()
        self._act(self.health.restore(kept, now))
        self._command(self._life.start(now))

    def tick(self, late_s: float) -> None:
        """Let time pass."""
        now = time.monotonic()
        if not self._released:
            self._command(self._life.tick(now, late_s=late_s))
        self._act(self.health.tick(now, late_s=late_s))

    def gate(self, slot: int, now: float) -> str | None:
        """Say why no process may be started in a slot now, if so."""
        uuid = self._devices[slot].id
        if uuid not in self._slots:
            return None
        if uuid in self._released:
            return "its device is released to an operator"
        reading = self.health.cards[uuid].reading
        return self.health.start_refusal(uuid, now) or self._memory.refusal(uuid, reading, now)

    def worker_started(self, slot: int) -> None:
        """A process was started in a slot."""
        uuid = self._devices[slot].id
        if uuid in self._slots:
            self._memory.started(uuid, self.health.cards[uuid].reading)

    def worker_signalled(self, slot: int) -> None:
        """We are ending a slot's process."""
        self.health.worker_killed(self._devices[slot].id, time.monotonic())

    def worker_exited(self, slot: int, *, asked: bool) -> None:
        """A slot's process has ended."""
        uuid, now = self._devices[slot].id, time.monotonic()
        if uuid in self._slots:
            self._memory.ended(uuid, now)
            if not asked:
                self._act(self.health.worker_died(uuid, now))

    def clear(self, slot: int) -> str | None:
        """An operator wants a judged card back; say why not, if so."""
        uuid = self._devices[slot].id
        if uuid not in self._slots:
            return None
        if refusal := self.health.cards[uuid].clear_refusal():
            return refusal
        self._act(self.health.clear(uuid))
        return None

    def release(self, slots: Collection[int]) -> None:
        """Let go of devices. NVML holds every card open, so the probe ends until all are taken back; health is unknown meanwhile."""
        self._released |= {uuid for uuid, slot in self._slots.items() if slot in slots}
        if self._released:
            self.health.watching = False
            self._command(self._life.stop())

    @property
    def any_released(self) -> bool:
        """Whether an operator has a device."""
        return bool(self._released)

    def take_back(self, slots: Collection[int]) -> None:
        """Take devices back."""
        had = bool(self._released)
        self._released -= {uuid for uuid, slot in self._slots.items() if slot in slots}
        if had and not self._released:
            self.health.watching = True
            self._life = ProbeLife(first_epoch=self._life.epoch)
            self._command(self._life.start(time.monotonic()))

    def view(self, slot: int) -> dict[str, Any]:
        """What `status` says of a slot's card."""
        card = self.health.cards.get(self._devices[slot].id)
        if card is None:
            return {"health": "ok"}
        reason, needs = card.explanation()
        r = card.reading or CardReading(card.uuid)
        return {
            "health": str(card.health(time.monotonic())), "reason": reason or None, "needs": str(needs) or None, "xid": card.xid,
            "memory_used_bytes": r.memory_used_bytes, "memory_total_bytes": r.memory_total_bytes, "utilization": r.utilization,
            "temperature_c": r.temperature_c, "power_w": r.power_w, "clocks_events": r.clocks_events(),
            "factor": card.throttle.factor,
            "released": card.uuid in self._released,
            "probe_pids": [child.pid for child in self._children.values()],
        }  # fmt: skip

    def stop(self) -> None:
        """End the probe, the pool stops."""
        self._command(self._life.stop())
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    # The probe's process.

    def _command(self, commands: list[ProbeCommand]) -> None:
        for command in commands:
            match command:
                case SpawnProbe(epoch, reason):
                    self._spawn(epoch, reason)
                case KillProbe(epoch, reason):
                    self._log.event.info("probe_killed", epoch=epoch, reason=reason)
                    if child := self._children.get(epoch):
                        child.signal(signal.SIGKILL)

    def _spawn(self, epoch: int, reason: str) -> None:
        now = time.monotonic()
        try:
            child = self._start_child(
                "gpupool.supervisor.cards.probe", {},
                on_exit=lambda _: self._ended(epoch), on_readable=lambda child: self._hear(epoch, child),
            )  # fmt: skip
        except OSError as e:
            self._log.event.error("probe_not_spawned", error=str(e))
            self._life.ended(epoch, now)
            return
        child.channel.send({
            "t": "spec", "devices": list(self._slots), "interval_s": _INTERVAL_S, "kernel_log": True,
            "leave": self.health.left_alone(now) | dict.fromkeys(self._released, _RELEASED_S), "log": asdict(self._log_spec()),
        })  # fmt: skip
        self._children[epoch] = child
        self._log.event.info("probe_spawned", child=child.pid, epoch=epoch, reason=reason)

    def _ended(self, epoch: int) -> None:
        self._children.pop(epoch, None)
        self._life.ended(epoch, time.monotonic())

    def _hear(self, epoch: int, child: Child) -> None:
        try:
            message = child.channel.receive()
        except EOFError:
            child.ignore_channel()
            return
        now = time.monotonic()
        if message is None or not self._life.heard(epoch, now):
            return
        health = self.health
        match message:
            case {"t": "readings", "cards": list(cards)}:
                self._act(health.readings([r for c in cards if (r := reading_from(c))], now))
            case {"t": "xid", "uuid": str(uuid), "xid": int(xid), "source": str(source)}:
                self._act(health.xid(uuid, xid, source, now, text=str(message.get("text", "")), ours=self._is_ours(message)))
            case {"t": "stuck", "uuid": uuid, "call": str(call)}:
                self._act(health.stuck(uuid, call, now))
            case {"t": "no_nvml", "reason": str(reason), "code": code}:
                self._act(health.no_nvml(reason, code))
            case {"t": "up"}:
                self._log.event.info("probe_up", **{k: message.get(k) for k in ("driver", "nvml", "kernel_log")})
            case _:
                self._log.event.warning("unknown_message", source="probe", kind=message.get("t"))

    def _is_ours(self, message: dict[str, Any]) -> bool | None:
        """Whether the process that the kernel names is one of ours; None where it names none, or counts pids differently from us."""
        pid, ours = message.get("pid"), self._worker_pids()
        if not isinstance(pid, int):
            return None
        if pid in ours:
            return True
        try:
            return os.getpgid(pid) in ours  # a helper of a worker's: workers lead their process groups
        except OSError:
            return None

    # The side-car's lines.

    def _on_kernel_line(self, sock: socket.socket) -> None:
        try:
            line = sock.recv(_MAX_LINE).decode("utf-8", "replace")
        except OSError:
            return
        fault = parse_kernel_line(line)
        if fault is None:
            return
        for device in self._devices:
            if device.bus and device.bus.partition(".")[0] == fault.bus:
                ours = self._is_ours({"pid": fault.pid})
                self._act(self.health.xid(device.id, fault.xid, "kernel", time.monotonic(), text=fault.text, ours=ours))
                return

    # Verdicts.

    def _act(self, verdicts: Sequence[v.CardVerdict]) -> None:
        for verdict in verdicts:
            match verdict:
                case v.RestartWorker(uuid, reason):
                    self._feed(ev.WorkerCondemned(self._slots[uuid], reason))
                case v.Quarantine(uuid, reason, needs):
                    self._feed(ev.CardJudged(self._slots[uuid], lost=False, reason=reason, needs=str(needs)))
                case v.Lose(uuid, reason, needs):
                    self._feed(ev.CardJudged(self._slots[uuid], lost=True, reason=reason, needs=str(needs)))
                case v.Readmit(uuid, reason):
                    self._feed(ev.CardReadmitted(self._slots[uuid], reason))
                case v.SetCardFactor(uuid, factor, reason):
                    self._log.event.warning("card_throttled", device=uuid, factor=factor, reason=reason)
                    self._feed(ev.CardThrottled(self._slots[uuid], factor, reason))
                case v.LeaveAlone(uuid, seconds, reason):
                    self._log.event.warning("card_left_alone", device=uuid, seconds=seconds, reason=reason)
                    for child in self._children.values():
                        child.channel.send({"t": "leave", "uuid": uuid, "seconds": seconds})
                case v.Note(level, text, uuid, xid):
                    getattr(self._log.event, level)("card_note", text=text, device=uuid, xid=xid)
                case _:
                    assert_never(verdict)


def _bind(path: Path, log: Log) -> socket.socket | None:
    """Open the side-car's door, for our group only."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    old = os.umask(0o117)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
    except OSError as e:
        log.event.warning("xid_socket_not_bound", path=str(path), error=str(e))
        sock.close()
        return None
    finally:
        os.umask(old)
    return sock
