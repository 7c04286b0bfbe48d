"""Handlers for tests that start the real program: each does one thing, right or wrong, as its options or its sample say."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Echo:
    """Returns its samples."""

    def load(self, context: Any) -> None:
        self.options = context.options
        note(
            "load",
            device=str(context.device),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            threads=os.environ.get("OMP_NUM_THREADS"),
        )

    def forward(self, batch: list[Any]) -> Any:
        note("forward", n=len(batch), ids=[x.get("i") if isinstance(x, dict) else None for x in batch])
        return batch


class Sleep(Echo):
    """Sleeps for options.seconds, or for the longest `sleep` of its samples."""

    def forward(self, batch: list[Any]) -> Any:
        super().forward(batch)
        time.sleep(max([self.options.get("seconds", 0.0), *(x.get("sleep", 0.0) for x in batch if isinstance(x, dict))]))
        return batch


class SlowFirst(Echo):
    """Sleeps for a sample's `sleep` when it sees its `i` for the first time, in whichever worker; runs it at once after that."""

    def forward(self, batch: list[Any]) -> Any:
        super().forward(batch)
        for sample in batch:
            if sample.get("sleep"):
                try:
                    Path(f"{os.environ['TOY_LOG']}.{sample['i']}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                time.sleep(sample["sleep"])
        return batch


class TroubleBeside(Echo):
    """Ends its process in the stage that a sample names."""

    def preprocess(self, sample: Any) -> Any:
        self._perhaps_die(sample, "preprocess")
        return sample

    def postprocess(self, result: Any) -> Any:
        self._perhaps_die(result, "postprocess")
        return result

    def _perhaps_die(self, sample: Any, stage: str) -> None:
        if sample.get("in") == stage:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(5)


class TroubleForTwo(Echo):
    """Kills its process in preprocess for the sample `kill`, the first time when the sample `bystand` is in another thread's."""

    def preprocess(self, sample: Any) -> Any:
        bystander = Path(f"{os.environ['TOY_LOG']}.bystander")
        match sample.get("do"):
            case "bystand" if not bystander.exists():
                bystander.touch()
                time.sleep(60)
            case "kill":
                while not bystander.exists():
                    time.sleep(0.002)
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(5)
        return sample


class Gated(Echo):
    """Its preprocess waits until the file that the sample names as `gate` is there, and then sends its process the sample's `signal`."""

    def preprocess(self, sample: Any) -> Any:
        note("preprocess", i=sample["i"])
        while not Path(sample.get("gate", "/")).exists():
            time.sleep(0.002)
        if "signal" in sample:
            os.kill(os.getpid(), getattr(signal, sample["signal"]))
            time.sleep(5)
        return sample


class Trouble(Echo):
    """Does what a sample's `do` says."""

    def forward(self, batch: list[Any]) -> Any:
        super().forward(batch)
        results: Any = batch
        for sample in batch:
            match sample.get("do"):
                case "raise":
                    raise ValueError(f"sample {sample['i']} is bad")
                case "kill":
                    os.kill(os.getpid(), getattr(signal, sample.get("signal", "SIGKILL")))
                    time.sleep(5)
                case "exit":
                    os._exit(sample["code"])
                case "sys_exit":
                    sys.exit(3)
                case "hang":
                    threading.Event().wait()
                case "sleep":
                    time.sleep(sample["s"])
                case "spin":
                    end = time.monotonic() + sample["s"]
                    while time.monotonic() < end:
                        pass
                case "short":
                    results = batch[:-1]
                case "extra":
                    results = [*batch, None]
                case "none":
                    return None
                case "generator":
                    return (x for x in batch)
                case "oom" if len(batch) > sample.get("over", 0):
                    raise OutOfMemoryError("CUDA out of memory (pretended)")
                case "cuda":
                    raise RuntimeError("CUDA error: device-side assert triggered")
                case "print":
                    print("x" * sample["n"], flush=True)
                    print("<stderr>", file=sys.stderr, flush=True)
                case "helper":
                    os.system("exit 3")
                case _:
                    pass
        return results


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


OutOfMemoryError.__module__ = "torch"


class Odd(Echo):
    """Returns a value that is hard to encode, by its sample's `kind`."""

    def forward(self, batch: list[Any]) -> Any:
        import numpy as np

        values = {
            "f32": np.float32(1.5), "i64": np.int64(7), "bool": np.bool_(True), "nan": float("nan"), "inf": float("inf"), "set": {1, 2},
            "big": 2**70, "array": np.arange(6).reshape(2, 3).T, "object": object(), "text": "ok",
        }  # fmt: skip
        return [values[x["kind"]] for x in batch]


class BadLoad(Echo):
    """Cannot be loaded until the file options.fixed exists."""

    def load(self, context: Any) -> None:
        super().load(context)
        if not Path(context.options["fixed"]).exists():
            raise RuntimeError("this model cannot be loaded")


class SlowLoad(Echo):
    """Takes options.seconds to load."""

    def load(self, context: Any) -> None:
        super().load(context)
        time.sleep(context.options["seconds"])


def note(event: str, **fields: Any) -> None:
    """Append a line to the file that the test reads."""
    if path := os.environ.get("TOY_LOG"):
        with open(path, "a") as file:
            file.write(json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n")


class CardOnly(Echo):
    """Cannot be loaded on a CPU."""

    def load(self, context: Any) -> None:
        super().load(context)
        if str(context.device) == "cpu":
            raise RuntimeError("this model needs a card")
