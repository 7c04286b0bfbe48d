"""A start waits for the last process's memory, for a bounded time."""

from __future__ import annotations

from gpupool.supervisor.cards.memory import PATIENCE_S, MemoryReturn
from gpupool.supervisor.cards.reading import CardReading

GIB = 2**30


def reading(used: int) -> CardReading:
    return CardReading("GPU-1", memory_used_bytes=used, memory_total_bytes=80 * GIB)


def test_a_start_waits_until_the_memory_has_come_back() -> None:
    memory = MemoryReturn()
    memory.started("GPU-1", reading(1 * GIB))
    assert memory.refusal("GPU-1", reading(60 * GIB), 10.0) is None  # the process is alive: nobody asks for another
    memory.ended("GPU-1", 10.0)
    assert "59.0 GiB" in (memory.refusal("GPU-1", reading(60 * GIB), 11.0) or "")
    assert memory.refusal("GPU-1", reading(2 * GIB), 12.0) is None


def test_it_never_waits_for_ever_nor_without_readings() -> None:
    memory = MemoryReturn()
    memory.started("GPU-1", reading(1 * GIB))
    memory.ended("GPU-1", 10.0)
    assert memory.refusal("GPU-1", reading(60 * GIB), 10.0 + PATIENCE_S + 0.1) is None
    assert memory.refusal("GPU-1", None, 11.0) is None
    assert memory.refusal("GPU-1", CardReading("GPU-1"), 11.0) is None
    assert memory.refusal("GPU-2", reading(60 * GIB), 11.0) is None
