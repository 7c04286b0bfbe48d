"""This worker's device, through torch if the model uses it: memory limit, synchronising, giving memory back.

torch is never imported for a CPU device. For a card it is, before the model: the memory limit must stand before the first allocation.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, Final

from gpupool.spec import MemorySpec

_PLAIN: Final = frozenset({str, int, float, bool, bytes, type(None)})


class DeviceError(Exception):
    """The card is not there, or not the only one that this process sees."""


class Device:
    """One device by torch's name, "cpu" or "cuda:0"."""

    def __init__(self, name: str, device_id: str) -> None:
        self.name = name
        self.id = device_id
        self.kind = name.partition(":")[0]

    def prepare(self, memory: MemorySpec) -> None:
        """Look at the card and limit what this process may take of it. A worker without torch leaves its card to the model.

        Raises:
            DeviceError: when the card cannot be used.
        """
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

    def set_threads(self, count: int) -> None:
        """Hold torch to the worker's share of CPU threads, where the environment gave one."""
        torch = sys.modules.get("torch")
        if torch is not None and "OMP_NUM_THREADS" in os.environ and torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def synchronize(self) -> None:
        """Wait for what forward has launched: only then are its time and its errors known. May raise what forward caused."""
        if (cuda := self._cuda()) is not None:
            cuda.synchronize()

    def to_host(self, outputs: list[Any]) -> list[Any]:
        """Copy tensors on the card to host memory. Done later, beside the next batch, the copy would wait for that batch's end."""
        if self._cuda() is None:
            return outputs
        tensor = sys.modules["torch"].Tensor

        def copy(value: Any) -> Any:
            kind = type(value)
            if kind in _PLAIN:
                return value
            if isinstance(value, tensor):
                return value.detach().cpu()
            if kind is list or kind is tuple:
                return kind([copy(v) for v in value])
            return {k: copy(v) for k, v in value.items()} if kind is dict else value

        return [copy(output) for output in outputs]

    def release(self) -> None:
        """Give back what an out-of-memory error may have left: objects in cycles, cached blocks."""
        gc.collect()
        if (cuda := self._cuda()) is not None:
            cuda.empty_cache()

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
            "free_bytes": free, "total_bytes": total,
        }  # fmt: skip

    def _cuda(self) -> Any:
        torch = sys.modules.get("torch") if self.kind == "cuda" else None
        return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
