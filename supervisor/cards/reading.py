"""What the probe reads from one card at one moment, and its form on the channel.

Every value may be None: drivers, MIG instances and old cards each leave some out, and a value that cannot be told is never zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: NVML return codes that say something about the card rather than about the query.
NOT_FOUND: Final = 6
CORRUPTED_INFOROM: Final = 14
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
VERSION_MISMATCH: Final = 18
GPU_NOT_FOUND: Final = 28
#: With one of these the card is gone: off the bus, or not enumerated any more.
LOST_CODES: Final = frozenset({NOT_FOUND, GPU_IS_LOST, GPU_NOT_FOUND})

#: Bits of nvmlClocksEventReason: why a card's clocks are lower than they could be.
CLOCKS_EVENTS: Final = {
    0x1: "gpu_idle", 0x2: "applications_clocks", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost", 0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake_slowdown", 0x100: "display_clocks",
}  # fmt: skip

#: Longer texts are cut: sixteen cards must fit one channel message many times over.
_MAX_TEXT: Final = 200


@dataclass(frozen=True, slots=True)
class CardReading:
    """One card. `uuid` is the pool's name for the device, `card` the card it lives on (the same, except for a MIG instance)."""

    uuid: str
    card: str = ""
    index: int | None = None
    bus: str | None = None  # as in /sys/bus/pci/devices
    name: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization: float | None = None  # 0 to 1
    temperature_c: float | None = None
    power_w: float | None = None
    clocks_reasons: int | None = None  # nvmlClocksEventReason bits
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remapped_pending: bool | None = None
    remapped_failure: bool | None = None
    recovery_action: int | None = None  # NVML field 230; None before driver R570
    lost: bool = False
    error: str | None = None  # why nothing could be read
    error_code: int | None = None  # NVML's number for it

    def clocks_events(self) -> dict[str, bool] | None:
        """Return each reason and whether it holds now; None when that cannot be told."""
        bits = self.clocks_reasons
        return None if bits is None else {name: bool(bits & bit) for bit, name in CLOCKS_EVENTS.items()}

    def to_message(self) -> dict[str, Any]:
        """Turn it into plain values; texts are cut, numbers that are not finite become None."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}


def reading_from(message: Mapping[str, Any]) -> CardReading | None:
    """Read one card of a `readings` message; a value of a wrong type becomes None. None without a name: nobody would know whose it is."""
    uuid = message.get("uuid")
    if not isinstance(uuid, str) or not uuid:
        return None
    values: dict[str, Any] = {"uuid": uuid}
    for name, kinds in _KINDS.items():
        value = message.get(name)
        # bool is an int to Python, not to us.
        if isinstance(value, kinds) and (kinds == (bool,) or not isinstance(value, bool)):
            values[name] = value
    values.setdefault("card", uuid)
    return CardReading(**values)


_KINDS: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("card", "bus", "name", "error"), (str,)),
    **dict.fromkeys(
        (
            "index",
            "memory_used_bytes",
            "memory_total_bytes",
            "clocks_reasons",
            "ecc_uncorrected",
            "recovery_action",
            "error_code",
        ),
        (int,),
    ),
    **dict.fromkeys(("utilization", "temperature_c", "power_w"), (int, float)),
    **dict.fromkeys(("remapped_pending", "remapped_failure", "lost"), (bool,)),
}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
