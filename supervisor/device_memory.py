"""What share of a device's memory, or of its worker's budget if that is fuller, is in use, as far as reports and readings can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_use(report: Mapping[str, Any], card: Mapping[str, Any]) -> float:
    """Return it, 0 to 1; 0 when nobody can tell.

    The report goes first, for it knows what the allocator only keeps in reserve: that is free for the next batch. Whatever other processes
    hold counts.

    Args:
        report: the memory part of the worker's last report, in bytes.
        card: what is known of its card (see status).
    """
    budget, held = report.get("budget_bytes"), report.get("used_bytes")
    own = float(held / budget) if budget and held is not None else 0.0
    return max(own, _of_device(report, card))


def _of_device(report: Mapping[str, Any], card: Mapping[str, Any]) -> float:
    total, free = report.get("total_bytes"), report.get("free_bytes")
    if total and free is not None:
        spare = max(0, report.get("reserved_bytes", 0) - report.get("allocated_bytes", 0))
        used = total - free - spare
    else:
        total, used = card.get("memory_total_bytes"), card.get("memory_used_bytes")
    return max(0.0, min(1.0, float(used / total))) if total and used is not None else 0.0
