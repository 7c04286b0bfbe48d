"""A model that keeps something of every sample it has seen, as caches without a bound do."""

from __future__ import annotations

import time
from typing import Any


class Leaky:
    """Answers with the sample; takes `seconds` for a batch, and keeps `keep_bytes` for each sample."""

    def load(self, context: Any) -> None:
        """Read the options."""
        self._seconds, self._keep = context.options.get("seconds", 0.0), context.options.get("keep_bytes", 0)
        self._kept: list[bytes] = []

    def forward(self, batch: list[Any]) -> list[Any]:
        """Answer, and remember."""
        time.sleep(self._seconds)
        self._kept += [b"x" * self._keep for _ in batch]  # not zeros: those the kernel gives for nothing
        return batch
