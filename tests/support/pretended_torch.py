"""As much of torch as the worker's device asks of it: a card with a caching allocator, in plain numbers."""

from __future__ import annotations

from typing import Any


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


class _Properties:
    uuid = "0"


class _Block:
    """A tensor that gives its memory back to the cache when it is dropped."""

    def __init__(self, torch: PretendedTorch, size: int) -> None:
        self._torch, self._size = torch, torch.take(size)

    def __del__(self) -> None:
        self._torch.give(self._size)


class _Memory:
    """torch.cuda.memory: the history."""

    def __init__(self) -> None:
        self.recording = False
        self.history = {"segments": [], "device_traces": [[{"action": "alloc"}]]}

    def _record_memory_history(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.recording = enabled is not None

    def _snapshot(self) -> dict[str, Any]:
        assert self.recording
        return self.history


class PretendedTorch:
    """The module; its `cuda` is itself. Sizes in bytes; `fraction` is the share of the card that was permitted."""

    uint8 = "uint8"
    Tensor = _Block

    def __init__(self, total: int, free: int) -> None:
        self.total, self.free = total, free
        self.allocated = self.reserved = self.peak = self.emptied = self.from_driver = 0
        self.fraction = 1.0
        self.memory = _Memory()
        self.cuda = self

    # As an allocator.

    def take(self, size: int) -> int:
        """Allocate, from the cache if it has so much, else from the driver too."""
        missing = max(0, self.allocated + size - self.reserved)
        if missing > self.free or self.reserved + missing > self.total * self.fraction:
            raise OutOfMemoryError("CUDA out of memory (pretended)")
        self.free, self.reserved = self.free - missing, self.reserved + missing
        self.from_driver += bool(missing)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        return size

    def give(self, size: int) -> None:
        """Free into the cache."""
        self.allocated -= size

    # As torch and torch.cuda.

    def empty(self, size: int, *, dtype: Any, device: str) -> _Block:
        """A tensor of bytes."""
        assert (dtype, device) == ("uint8", "cuda:0")
        return _Block(self, size)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None: ...

    def synchronize(self) -> None: ...

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, _: int) -> _Properties:
        return _Properties()

    def get_device_name(self, _: int) -> str:
        return "a pretended card"

    def set_per_process_memory_fraction(self, fraction: float, _: int) -> None:
        self.fraction = fraction

    def mem_get_info(self, _: int) -> tuple[int, int]:
        return self.free, self.total

    def memory_allocated(self, _: int) -> int:
        return self.allocated

    def memory_reserved(self, _: int) -> int:
        return self.reserved

    def reset_peak_memory_stats(self, _: int) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self, _: int) -> int:
        return self.peak

    def empty_cache(self) -> None:
        self.emptied += 1
        self.free, self.reserved = self.free + self.reserved - self.allocated, self.allocated
