"""What a supervisor must still know after its own restart: which workers an operator holds, and which cards were judged and why.

A restart never heals a card. What was judged carries the boot id: a new boot has reset the hardware, the same boot has not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class KeptSlot:
    """One device's wish of the operator."""

    held: bool = False


@dataclass(frozen=True, slots=True)
class KeptCard:
    """One device's judgement; `since` in epoch seconds, for people."""

    state: str  # "quarantined" or "lost"
    reason: str
    needs: str = ""
    xid: int | None = None
    boot_id: str = ""
    since: float = 0.0
    recovery_asked: bool = False  # the driver asked for a recovery: its 0 later is a reset
    gone: bool = False  # it was seen not to answer


@dataclass(frozen=True, slots=True)
class Kept:
    """All of it, by device id."""

    slots: Mapping[str, KeptSlot] = field(default_factory=dict)
    cards: Mapping[str, KeptCard] = field(default_factory=dict)


class Unreadable(ValueError):
    """The text is not what `render` makes; says where."""


def render(kept: Kept) -> bytes:
    """Write as JSON."""
    return json.dumps({"version": VERSION, **asdict(kept)}, indent=1, sort_keys=True).encode() + b"\n"


def parse(data: bytes) -> Kept:
    """Read what `render` wrote.

    Raises:
        Unreadable: not JSON, another version, or a value of a wrong type. Half a file is believed no more than none:
            a quarantine that lost its reason could be neither explained nor cleared.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise Unreadable(f"not JSON: {e}") from None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise Unreadable(f"not a state file of version {VERSION}")
    return Kept(
        {name: KeptSlot(**_checked(f"slots.{name}", v, _SLOT)) for name, v in _map(document, "slots").items()},
        {name: KeptCard(**_checked(f"cards.{name}", v, _CARD)) for name, v in _map(document, "cards").items()},
    )


_SLOT: Final[dict[str, tuple[type, ...]]] = {"held": (bool,)}
_CARD: Final[dict[str, tuple[type, ...]]] = {
    "state": (str,), "reason": (str,), "needs": (str,), "xid": (int, type(None)), "boot_id": (str,), "since": (int, float),
    "recovery_asked": (bool,), "gone": (bool,),
}  # fmt: skip
_STATES: Final = ("quarantined", "lost")


def _map(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise Unreadable(f"{name}: expected an object")
    return value


def _checked(where: str, values: Any, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Take the known keys; unknown ones may come from a newer version and are left."""
    if not isinstance(values, dict):
        raise Unreadable(f"{where}: expected an object")
    for name, allowed in kinds.items():
        value = values.get(name)
        if name in values and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
            raise Unreadable(f"{where}.{name}: {value!r}")
    if "state" in kinds and (values.get("state") not in _STATES or "reason" not in values):
        raise Unreadable(f"{where}: needs a state ({' or '.join(_STATES)}) and a reason")
    return {name: values[name] for name in kinds if name in values}
