"""One event as a line for people: when, how grave, which worker and card, what, why, and then the rest as key=value."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from gpupool.visible import visible

#: Told at the line's start, or of no use to people.
_LEADING: Final = frozenset(
    {"n", "time", "timestamp", "level", "event", "component", "pid", "worker", "device", "workers", "devices"}
)
#: What says why, the best first; one is said in words, without its key.
_REASONS: Final = ("reason", "cause", "problem", "error", "message", "text")
#: Of a text with several lines the last says most.
_MAX_VALUE: Final = 160


def line_of(event: Mapping[str, Any]) -> str:
    """Make the line."""
    head = f"{moment(event.get('time'))}  {event.get('level')!s:<7}  {who(event):<22}  {event.get('event')}"
    words = words_of(event)
    return visible(f"{head}  {words}" if words else head)


def words_of(event: Mapping[str, Any]) -> str:
    """Why it was, then what else is known, in the order in which it was logged."""
    rest = {k: v for k, v in event.items() if k not in _LEADING and v not in (None, "", [], {})}
    why = next((str(rest.pop(name)) for name in _REASONS if name in rest), "")
    for name in ("cause", "reason"):  # often the same in other words
        if str(rest.get(name)) in why:
            rest.pop(name, None)
    more = " ".join(f"{name}={_short(value)}" for name, value in rest.items())
    return "; ".join(part for part in (why, more) if part)


def who(event: Mapping[str, Any]) -> str:
    """Name the workers that an event is about, each with its card; else who speaks."""
    slots, devices = event.get("workers"), event.get("devices")
    if isinstance(slots, list) and slots:
        cards = devices if isinstance(devices, list) and len(devices) == len(slots) else [None] * len(slots)
        return ", ".join(_worker(slot, card) for slot, card in zip(slots, cards, strict=True))
    if event.get("worker") is not None:
        return _worker(event["worker"], event.get("device"))
    return str(event.get("device") or ("router" if event.get("component") == "router" else "pool"))


def moment(time: Any) -> str:
    """Local time, to the millisecond, of epoch seconds."""
    if not isinstance(time, int | float):
        return "?".ljust(23)
    return datetime.fromtimestamp(time).astimezone().isoformat(sep=" ", timespec="milliseconds")[:23]


def _worker(slot: Any, card: Any) -> str:
    return f"worker {slot} ({card})" if card else f"worker {slot}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) if all(isinstance(v, int | float) for v in value) else _short(value[-1])
    if isinstance(value, dict):
        return ",".join(f"{k}:{_short(v)}" for k, v in value.items())
    text = str(value).strip()
    text = text.rpartition("\n")[2]
    text = text if len(text) <= _MAX_VALUE else f"…{text[-_MAX_VALUE:]}"
    return f'"{text}"' if " " in text else text
