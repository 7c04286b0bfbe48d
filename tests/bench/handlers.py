"""The model of the echo benchmark."""

from __future__ import annotations

import time
from typing import Any


class Echo:
    """Gives back what it gets, with nothing in between."""

    def forward(self, batch: list[Any]) -> list[Any]:
        return batch


class Stamped:
    """Tells when its forward began and ended, and with how many samples. Takes `seconds`, asleep or in torch's hands.

    Both let go of the interpreter, as work on a device does.
    """

    def load(self, context: Any) -> None:
        self._seconds, self._in_torch = context.options["seconds"], context.options.get("torch", False)
        if self._in_torch:
            import torch

            self._x = torch.randn(256, 256)

    def forward(self, batch: list[Any]) -> list[Any]:
        began = time.monotonic()
        if self._in_torch:
            while time.monotonic() < began + self._seconds:
                for _ in range(4):
                    self._x @ self._x
        elif self._seconds:
            time.sleep(self._seconds)
        return [[began, time.monotonic(), len(batch)]] * len(batch)


class Prepared(Stamped):
    """The same with a preprocess that takes `preprocess` seconds, asleep: it lets go of the interpreter as decoding a picture does."""

    def load(self, context: Any) -> None:
        super().load(context)
        self._preprocess = context.options.get("preprocess", 0.0)

    def preprocess(self, sample: Any) -> Any:
        if self._preprocess:
            time.sleep(self._preprocess)
        return sample
