"""A model of which one worker becomes slow: FACTOR times from the moment on at which the file `$TOY_LOG.slow.PID` is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

FACTOR = 4.0


def slow_file(toy_log: str | Path, pid: int) -> Path:
    """The file that makes the worker of this process slow."""
    return Path(f"{toy_log}.slow.{pid}")


class Slowing:
    """Answers with the sample. A batch takes `fixed_s` and `each_s` for each sample, in seconds; a sample may say its `length`."""

    def load(self, context: Any) -> None:
        """Read the options."""
        self._fixed_s, self._each_s = context.options["fixed_s"], context.options["each_s"]
        self._slow = slow_file(os.environ["TOY_LOG"], os.getpid())

    def length(self, sample: dict[str, Any]) -> int:
        """The sample's own word."""
        return int(sample.get("length", 1))

    def forward(self, batch: list[Any]) -> list[Any]:
        """Take the time that is due."""
        time.sleep((self._fixed_s + self._each_s * len(batch)) * (FACTOR if self._slow.exists() else 1.0))
        return batch
