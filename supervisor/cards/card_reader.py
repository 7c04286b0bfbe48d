"""Reads the pool's cards through NVML: every value by itself, so that what one driver lacks costs that value and nothing else.

The module pynvml is handed in: this file does not decide whether there is one. Each call may hang; only the probe makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .reading import CORRUPTED_INFOROM, GPU_IS_LOST, GPU_NOT_FOUND, LOST_CODES, RESET_REQUIRED, CardReading
from .xid import bus_name

#: nvmlEventData says so when an event is about the whole card.
_WHOLE_CARD: Final = 0xFFFFFFFF
#: Answers of any query that are about the card, not about the query.
_ABOUT_THE_CARD: Final = (GPU_IS_LOST, GPU_NOT_FOUND, RESET_REQUIRED, CORRUPTED_INFOROM)
_RECOVERY_FIELD: Final = 230

#: Told which device is about to be asked and by which call: a hung call is then known by name.
Entering = Callable[[str | None, str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """What one device name stands for."""

    uuid: str
    handle: Any  # of the device itself: a card or a MIG instance
    card: Any  # of its card
    card_uuid: str
    bus: str | None
    instance: int | None


class CardReader:
    """The pool's devices (UUIDs of cards or MIG instances) and the initialised module to ask about them."""

    def __init__(self, nvml: Any, devices: Sequence[str], entering: Entering) -> None:
        self._nvml, self._devices, self._entering = nvml, devices, entering
        self._places: dict[str, Place] = {}
        self._stale: set[str] = set()  # to be found again: a handle does not outlive its card's absence

    def read(self, uuid: str) -> CardReading:
        """Read one device. Never raises for what a card, a driver or a binding does."""
        ask = _Query(self._nvml, uuid, self._entering)
        try:
            place = self._find(uuid, ask)
            if place is None:
                reading = CardReading(uuid, uuid, lost=ask.code in LOST_CODES, error=ask.error, error_code=ask.code)
            else:
                reading = self._read(place, _Query(self._nvml, uuid, self._entering))
        finally:
            self._entering(None, "")
        if reading.error:
            self._stale.add(uuid)
        return reading

    def cards(self) -> list[tuple[str, Any]]:
        """Each card that answers once, by UUID and handle."""
        return list({p.card_uuid: p.card for p in list(self._places.values()) if p.uuid not in self._stale}.items())

    def named(self, card_uuid: str, instance: int | None) -> str:
        """Name what an event is about: a MIG instance if it is one of the pool's, else the card."""
        for place in list(self._places.values()):
            if place.card_uuid == card_uuid and instance not in (None, _WHOLE_CARD) and place.instance == instance:
                return place.uuid
        return card_uuid

    def at_bus(self, bus: str) -> str | None:
        """Find the card at a bus address (without the function number), if it is one of the pool's."""
        found = (p.card_uuid for p in list(self._places.values()) if p.bus and bus_name(p.bus) == bus)
        return next(found, None)

    def _find(self, uuid: str, ask: _Query) -> Place | None:
        if uuid in self._places and uuid not in self._stale:
            return self._places[uuid]
        handle = ask("nvmlDeviceGetHandleByUUID", uuid)
        if handle is None:
            return None
        card, card_uuid, instance = handle, uuid, None
        if ask("nvmlDeviceIsMigDeviceHandle", handle):
            card = ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            if card is None:
                return None
            card_uuid = ask("nvmlDeviceGetUUID", card) or uuid
            instance = ask("nvmlDeviceGetGpuInstanceId", handle)
        pci = ask("nvmlDeviceGetPciInfo", card)
        bus = None if pci is None else f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
        self._stale.discard(uuid)
        place = self._places[uuid] = Place(uuid, handle, card, card_uuid, bus, instance)
        return place

    def _read(self, place: Place, ask: _Query) -> CardReading:
        card = place.card
        memory = ask("nvmlDeviceGetMemoryInfo", place.handle)
        use = ask("nvmlDeviceGetUtilizationRates", place.handle)
        temperature = ask("nvmlDeviceGetTemperature", card, 0)
        power = ask("nvmlDeviceGetPowerUsage", card)
        remapped = ask("nvmlDeviceGetRemappedRows", card)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", card)
        if reasons is None:  # its name before R535
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", card)
        values = ask("nvmlDeviceGetFieldValues", card, [_RECOVERY_FIELD])
        recovery = int(values[0].value.uiVal) if values and values[0].nvmlReturn == 0 else None
        values_read: dict[str, Any] = {
            "index": ask("nvmlDeviceGetIndex", card),
            "name": ask("nvmlDeviceGetName", card),
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "utilization": None if use is None else min(1.0, use.gpu / 100),
            "temperature_c": temperature,
            "power_w": None if power is None else power / 1000,
            "clocks_reasons": reasons,
            "ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", card, 1, 0),  # uncorrected, since the driver was loaded
            "remapped_pending": None if remapped is None else bool(remapped[2]),
            "remapped_failure": None if remapped is None else bool(remapped[3]),
            "recovery_action": recovery,
        }
        lost, nothing = ask.code in LOST_CODES, all(v is None for v in (memory, use, temperature, power))
        # After a fault some calls are still answered from memory: one that says "lost" is believed, not those.
        unusable = lost or nothing or ask.code == RESET_REQUIRED
        return CardReading(
            place.uuid, place.card_uuid, bus=place.bus, lost=lost, **values_read,
            error=(ask.error or "no value can be read") if unusable else None,
            error_code=ask.code if unusable or ask.code in _ABOUT_THE_CARD else None,
        )  # fmt: skip


class _Query:
    """The calls of one reading. A call that fails gives None; the first failure that says something of the card is kept."""

    def __init__(self, nvml: Any, uuid: str, entering: Entering) -> None:
        self._nvml, self._uuid, self._entering = nvml, uuid, entering
        self.error: str | None = None
        self.code: int | None = None

    def __call__(self, call: str, *args: Any) -> Any:
        self._entering(self._uuid, call)
        try:
            function = getattr(self._nvml, call, None)  # an older nvidia-ml-py lacks the newest
            return None if function is None else text(function(*args))
        except UnicodeDecodeError as e:  # some cards have names that are no text
            return text(e.object)
        except self._nvml.NVMLError as e:
            code = int(e.value)
            if self.error is None or (code in _ABOUT_THE_CARD and self.code not in _ABOUT_THE_CARD):
                self.error, self.code = f"{text(str(e))} ({call})", code
            return None


def text(value: Any) -> Any:
    """Make text of bytes: older bindings return names so."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
