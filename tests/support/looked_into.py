"""A model to look into: torch where it is there, and what a sample's `do` says."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any


class LookedInto:
    """Multiplies matrices with torch if options.torch; `hang` waits for ever, `grab` takes the signals that stacks come by."""

    def load(self, context: Any) -> None:
        if context.options.get("torch"):
            import torch

            self.torch = torch
        if context.options.get("grab"):
            signal.signal(signal.SIGUSR2, lambda *_: None)

    def forward(self, batch: list[Any]) -> Any:
        for sample in batch:
            match sample.get("do"):
                case "hang":
                    self.hang_here()
                case "sleep":
                    time.sleep(sample["s"])
                case _:
                    pass
        if hasattr(self, "torch"):
            weights = self.torch.ones(4, 4)
            return [{"sum": float((self.torch.full((2, 4), float(sample["x"])) @ weights).sum())} for sample in batch]
        return [marked_echo(sample) for sample in batch]

    def hang_here(self) -> None:
        threading.Event().wait()


def marked_echo(sample: Any) -> Any:
    """A function to find in a profile."""
    return sample
