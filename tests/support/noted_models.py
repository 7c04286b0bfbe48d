"""Models that note each of their batches in a file: when it began and ended on the machine's clock, and how many samples it had."""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Note:
    """One batch. Instants in monotonic seconds; `units` is what its samples hold, `padded` what they take up when padded to the longest."""

    began: float
    ended: float
    rows: int
    units: int = 0
    padded: int = 0


def read(file: Path) -> list[Note]:
    """All notes so far, in order of beginning."""
    if not file.exists():
        return []
    lines = [line.split() for line in file.read_text().splitlines()]
    return sorted((Note(float(a), float(b), int(n), int(u), int(p)) for a, b, n, u, p in lines), key=lambda note: note.began)


class _Noted:
    def load(self, context: Any) -> None:
        """Read the options: `notes`, a file."""
        self._notes = os.open(context.options["notes"], os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC)

    def _note(self, began: float, rows: int, units: int = 0, padded: int = 0) -> None:
        os.write(self._notes, f"{began:.6f} {time.monotonic():.6f} {rows} {units} {padded}\n".encode())


class Asleep(_Noted):
    """Takes `fixed_s` and `each_s` for each sample, asleep."""

    def load(self, context: Any) -> None:
        """Read the options."""
        super().load(context)
        self._fixed_s, self._each_s = context.options["fixed_s"], context.options.get("each_s", 0.0)

    def forward(self, batch: list[Any]) -> list[Any]:
        """Sleep."""
        began = time.monotonic()
        time.sleep(self._fixed_s + self._each_s * len(batch))
        self._note(began, len(batch))
        return [None] * len(batch)


class Mlp(_Noted):
    """A deep, narrow network in torch on one thread: what a batch costs is mostly the number of its layers, and some of it its samples."""

    def load(self, context: Any) -> None:
        """Make the network: `layers` of `width`."""
        super().load(context)
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(1)
        layers, width = context.options["layers"], context.options["width"]
        self._width = width
        self._net = torch.nn.Sequential(
            *(m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU()))
        ).eval()

    def warmup(self) -> list[Any]:
        """Batches of several sizes."""
        return [{"n": n} for n in range(64)]

    def forward(self, batch: list[Any]) -> list[Any]:
        """Run it; the input is made of the samples' numbers."""
        import torch

        began = time.monotonic()
        x = torch.tensor([float(sample.get("n") or 0) for sample in batch]).unsqueeze(1).expand(-1, self._width)
        y = self._net(x)
        self._note(began, len(batch))
        return [float(v) for v in y[:, 0]]


class Product(_Noted):
    """Multiplies two square matrices for each sample, in torch on as many threads as it is given, and answers how many those are."""

    def load(self, context: Any) -> None:
        """Make them: `size` by `size`."""
        super().load(context)
        import torch

        self._x = torch.rand(context.options["size"], context.options["size"])

    def forward(self, batch: list[Any]) -> list[Any]:
        """Multiply."""
        import torch

        began = time.monotonic()
        for _ in batch:
            self._x @ self._x
        self._note(began, len(batch))
        return [torch.get_num_threads()] * len(batch)


class MiniLM(_Noted):
    """The package's MiniLM, with notes of tokens and padding. A sample's text is so many times a word of one token."""

    def load(self, context: Any) -> None:
        """Load it."""
        super().load(context)
        from gpupool.demo import model_directory

        spec = importlib.util.spec_from_file_location("noted_minilm", model_directory() / "model.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._model = module.MiniLM()
        self._model.load(context)

    def length(self, sample: Any) -> int:
        """Tokens."""
        return int(self._model.length(sample))

    def preprocess(self, sample: Any) -> Any:
        """Text to tokens."""
        return self._model.preprocess(sample)

    def forward(self, batch: list[Any]) -> Any:
        """Run it."""
        began = time.monotonic()
        result = self._model.forward(batch)
        self._note(began, len(batch), sum(map(len, batch)), len(batch) * max(map(len, batch)))
        return [float(v) for v in result[:, 0]]
