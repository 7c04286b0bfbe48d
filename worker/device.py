"""This worker's device, through torch if the model uses it: memory limit, synchronising, giving memory back.

torch is never imported for a CPU device. For a card it is, before the model: the memory limit must stand before the first allocation.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from gpupool.spec import MemorySpec

from . import transfer
from .budget import Budget, CardBudget, HostBudget

#: Between two looks at the cache, and between two times that it is emptied.
_LOOK_S: Final = 1.0
_EMPTY_AGAIN_S: Final = 10.0


class DeviceError(Exception):
    """The card is not there, or not the only one that this process sees."""


class Device:
    """One device by torch's name, "cpu" or "cuda:0"."""

    def __init__(self, name: str, device_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.id = device_id
        self.kind = name.partition(":")[0]
        self.host = HostBudget()
        self.card: CardBudget | None = None
        self.cache_emptied = 0  # times that cached memory was given back because it was above the threshold
        self._empty_above = 1.0
        self._clock = clock
        self._look_at = 0.0

    @property
    def budget(self) -> Budget:
        """The memory that batches must fit into."""
        return self.card or self.host

    def prepare(self, memory: MemorySpec) -> None:
        """Look at the card and limit what this process may take of it. A worker without torch leaves its card to the model.

        Raises:
            DeviceError: when the card cannot be used.
        """
        self.limit(memory)
        if self.kind != "cuda":
            return
        try:
            import torch  # a CPU worker must not pay seconds for it
        except ImportError:
            return
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if count != 1:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                raise DeviceError(f"expected to see 1 card, found {count} (CUDA_VISIBLE_DEVICES={visible})")
            seen = getattr(torch.cuda.get_device_properties(0), "uuid", None)  # torch 2.4 and newer
            if seen is not None and self.id.startswith("GPU-") and f"GPU-{seen}" != self.id:
                raise DeviceError(f"sees GPU-{seen}, and was given {self.id}")
            torch.cuda.set_per_process_memory_fraction(memory.limit_fraction, 0)
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except DeviceError:
            raise
        except Exception as e:
            raise DeviceError(f"{type(e).__name__}: {e}"[:1000]) from None
        self.card = CardBudget(torch, memory.limit_fraction)

    def limit(self, memory: MemorySpec) -> None:
        """Put those settings into force that may change while the worker runs."""
        self._empty_above = memory.empty_cache_above
        if self.kind == "cpu":
            self.host.set_limit(memory.cpu_limit_bytes or None)

    def set_threads(self, count: int) -> None:
        """Hold torch to the worker's share of CPU threads, where the environment gave one."""
        torch = sys.modules.get("torch")
        if torch is not None and "OMP_NUM_THREADS" in os.environ and torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def synchronize(self) -> None:
        """Wait for what forward has launched: only then are its time and its errors known. May raise what forward caused."""
        if (cuda := self._cuda()) is not None:
            cuda.synchronize()

    def to_host(self, outputs: Any) -> Any:
        """Copy tensors on the card to host memory. Done later, beside the next batch, the copy would wait for that batch's end.

        May raise what forward caused.
        """
        return outputs if self._cuda() is None else transfer.to_host(self.torch(), outputs)

    def brace(self) -> None:
        """Be ready for a run that may not fit."""
        self.budget.brace()

    def relieve(self) -> None:
        """Make room at once: a run has failed, perhaps for want of memory."""
        self.budget.relieve()

    def release(self) -> None:
        """Give back what an out-of-memory error may have left: objects in cycles, cached blocks."""
        self.budget.recover()

    def at_rest(self) -> int:
        """Return what is held although nothing runs, in bytes."""
        return self.budget.at_rest()

    def tidy(self) -> None:
        """Between batches, now and then: give cached memory back if what the allocator holds has passed the threshold.

        Not when it would give back next to nothing, and never more than once in ten seconds: memory that every batch needs would
        otherwise be fetched anew from the driver for every batch.
        """
        now = self._clock()
        if self.card is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        limit, reserved, used = self.card.limit(), self.card.reserved(), self.card.used()
        if limit and reserved > self._empty_above * limit and used < self._empty_above * limit:
            self.card.recover()
            self.cache_emptied += 1
            self._look_at = now + _EMPTY_AGAIN_S

    def describe(self) -> dict[str, Any]:
        """Say what this device is, for the supervisor."""
        cuda = self._cuda()
        name = self.name if cuda is None else cuda.get_device_name(0)
        return {"kind": self.kind, "id": self.id, "name": name}

    def memory(self) -> dict[str, int]:
        """Device memory in bytes as the allocator sees it; empty without a card."""
        cuda = self._cuda()
        if cuda is None:
            return {}
        free, total = cuda.mem_get_info(0)
        return {
            "allocated_bytes": cuda.memory_allocated(0), "reserved_bytes": cuda.memory_reserved(0),
            "free_bytes": free, "total_bytes": total, "cache_emptied_total": self.cache_emptied,
        }  # fmt: skip

    def torch(self) -> Any:
        """Return torch, where the device is a card and somebody has imported it; else None."""
        return sys.modules.get("torch") if self.kind == "cuda" else None

    def _cuda(self) -> Any:
        torch = self.torch()
        return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
