"""A model whose forward takes memory by batch and length: `bytes_per_unit` for each unit of length, padded to the longest of the batch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class Hungry:
    """Answers each sample with the batch it was in. Options: `bytes_per_unit`, `keep` (bytes kept for ever by each batch), `how`."""

    def load(self, context: Any) -> None:
        """Read the options."""
        options = context.options
        self._unit = options.get("bytes_per_unit", 1 << 20)
        self._warm = options.get("warm", [8])
        self._keep = options.get("keep", 0)
        self._how = options.get("how", "numpy")
        self._kept: list[Any] = []

    def warmup(self) -> list[dict[str, int]]:
        """Samples of the lengths in the option `warm`."""
        return [{"length": n} for n in self._warm]

    def length(self, sample: dict[str, Any]) -> int:
        """The sample's own word."""
        return int(sample["length"])

    def forward(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take the memory, touch all of it, let it go."""
        size = len(batch) * max(x["length"] for x in batch) * self._unit
        if self._keep:
            self._kept.append(np.ones(self._keep, np.uint8))
        held = self._take(size)
        del held
        return [{"n": x.get("n"), "rows": len(batch)} for x in batch]

    def _take(self, size: int) -> Any:
        match self._how:
            case "torch":
                import torch

                return torch.ones(size, dtype=torch.uint8)
            case "pieces":  # many blocks instead of one: nothing is left for anybody else when the last one fails
                return [np.ones(self._piece(), np.uint8) for _ in range(size // self._piece())]
            case "objects":
                return [bytes(200) for _ in range(size // 240)]
            case _:
                return np.ones(size, np.uint8)

    def _piece(self) -> int:
        return 16_000


class HungryBefore(Hungry):
    """Takes a sample's `length` in preprocess and holds it for its `seconds`; forward takes nothing. `keep` is kept by each preprocess."""

    length = None  # type: ignore[assignment]

    def preprocess(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Take the memory, touch all of it, let it go."""
        if self._keep:
            self._kept.append(np.ones(self._keep, np.uint8))
        held = self._take(sample["length"] * self._unit) if sample.get("how") != "pieces" else self._pieces(sample["length"])
        time.sleep(sample.get("seconds", 0.0))
        del held
        return sample

    def forward(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Say which it was."""
        return [{"n": x.get("n")} for x in batch]

    def _pieces(self, length: int) -> list[bytes]:
        return [bytes(16_000) + bytes([n % 256]) for n in range(length * self._unit // 16_000)]
