"""A pool's models inside this process: import the handler class, make it, load it, warm it up.

A handler is any class with `forward`; see `Model` for what else it may have. All that it does wrong here ends in one LoadError that
names the stage, and never in a traceback alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpupool.spec import ModelSpec

from . import transfer
from .faults import FaultKind, presentable, read_fault

_MAX_TRACEBACK: Final = 16_000
_MAX_WORDS: Final = 1000


class LoadError(Exception):
    """A model cannot be used: `stage` is import, load or warm_up, or config where only another configuration helps."""

    def __init__(self, stage: str, model: str, message: str, trace: str = "") -> None:
        super().__init__(f"model {model}: {stage}: {message}")
        self.stage = stage
        self.message = f"model {model}: {presentable(message, _MAX_WORDS)}"
        self.trace = presentable(trace[-_MAX_TRACEBACK:], _MAX_TRACEBACK)


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler's `load` is given.

    Attributes:
        device: torch's name of the device, "cpu" or "cuda:0" (the process sees no other card).
        options: the model's options from the configuration.
        directory: the model directory, "" for a handler given by import path alone.
        precision: the option of that name, if it is there: "fp16", "bf16", ….
        threads: CPU threads that this worker may use.
    """

    device: str
    options: dict[str, Any]
    directory: str
    precision: str | None
    threads: int

    def stack(self, samples: Sequence[Any]) -> Any:
        """Make one tensor on this device of samples of equal shape and dtype, or a dict of tensors of dicts with equal keys.

        Samples are numpy arrays, tensors in host memory, numbers or lists of numbers. On a card they go through pinned memory, and the
        copy runs on the current stream while the caller goes on.

        Raises:
            ValueError: naming the field, the sample and both shapes.
        """
        return transfer.stack(samples, self.device)

    def pad(self, samples: Sequence[Any], value: float = 0) -> tuple[Any, Any]:
        """Do the same with samples that differ in their first dimension, filled up with `value` to the longest.

        Returns the tensor and a mask of (samples, longest), true where there is a sample.

        Raises:
            ValueError: naming the sample and both shapes.
        """
        return transfer.pad(samples, self.device, value)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. What its handler does not have is None."""

    spec: ModelSpec
    forward: Callable[[list[Any]], Any]
    preprocess: Callable[[Any], Any] | None = None
    postprocess: Callable[[Any], Any] | None = None
    length: Callable[[Any], Any] | None = None
    load: Callable[[Context], Any] | None = None
    warmup: Callable[[], Any] | None = None


def threads() -> int:
    """CPU threads for this worker: OMP_NUM_THREADS where it is a number, else the CPUs that it may run on."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))


def inference_mode() -> AbstractContextManager[Any]:
    """Torch's inference mode if anybody has imported torch, else nothing: a forward that is the first to import it runs without."""
    torch = sys.modules.get("torch")
    mode = getattr(torch, "inference_mode", None)  # missing while another thread is importing torch
    return nullcontext() if mode is None else mode()


def import_model(spec: ModelSpec) -> Model:
    """Import and instantiate a handler.

    Raises:
        LoadError: with stage "import".
    """
    module_name, _, class_name = spec.handler.partition(":")
    if not module_name or not class_name:
        raise LoadError("import", spec.name, f'handler {spec.handler!r} is not of the form "pkg.module:Class"')
    try:
        if spec.directory:
            put_first(spec.directory)
            _forget_namesake(module_name.partition(".")[0], Path(spec.directory))
        target: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            target = getattr(target, part)
        handler = target()
    except BaseException as e:  # the border to the user's model; a sys.exit() at import is a failed import
        raise _load_error("import", spec, e) from None
    if not callable(getattr(handler, "forward", None)):
        raise LoadError("config", spec.name, f"{spec.handler} has no method forward(batch)")

    def method(name: str) -> Callable[..., Any] | None:
        found = getattr(handler, name, None)
        return found if callable(found) else None

    return Model(
        spec, handler.forward, method("preprocess"), method("postprocess"), method("length"), method("load"), method("warmup")
    )


def load_model(model: Model, device: str) -> None:
    """Call the handler's load(context), if it has one.

    Raises:
        LoadError: with stage "load".
    """
    if model.load is None:
        return
    options = model.spec.options
    precision = options.get("precision")
    precision = precision if isinstance(precision, str) else None
    try:
        model.load(Context(device, dict(options), model.spec.directory, precision, threads()))
    except BaseException as e:  # the border to the user's model
        raise _load_error("load", model.spec, e) from None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A warm-up sample after preprocess, and its length (0 where the handler does not tell any)."""

    length: int
    sample: Any


def warm_up(model: Model, check: Callable[[Any, int], Sequence[Any]], recover: Callable[[], None]) -> list[Prepared]:
    """Run what warmup() asks for, and return it prepared. It may return samples to run, or run what it likes itself.

    Args:
        model: a loaded model.
        check: turns what forward returned into one result per sample, or raises.
        recover: gives memory back after a batch that did not fit; it is run again in halves.

    Raises:
        LoadError: with stage "warm_up".
    """
    if model.warmup is None:
        return []
    try:
        with inference_mode():
            prepared = [_prepare(model, sample) for sample in model.warmup() or ()]
            at, most = 0, model.spec.batching.max_batch
            while at < len(prepared):
                batch = [each.sample for each in prepared[at : at + most]]
                if _fits(model, batch, check):
                    at += len(batch)
                else:
                    most = len(batch) // 2
                    recover()
    except BaseException as e:  # the border to the user's model
        raise _load_error("warm_up", model.spec, e) from None
    return prepared


def _prepare(model: Model, sample: Any) -> Prepared:
    length = int(model.length(sample)) if model.length is not None else 0
    return Prepared(length, sample if model.preprocess is None else model.preprocess(sample))


def _fits(model: Model, batch: list[Any], check: Callable[[Any, int], Sequence[Any]]) -> bool:
    """Run a batch; False when it did not fit into memory, and half of it may. Raises what else goes wrong."""
    try:
        for output in check(model.forward(list(batch)), len(batch)):
            if model.postprocess is not None:
                model.postprocess(output)
    except BaseException as e:
        if len(batch) == 1 or read_fault(e).kind is not FaultKind.OUT_OF_MEMORY:
            raise
        return False
    return True


def put_first(folder: str) -> None:
    """Make modules of a folder importable, before all others."""
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()


def _forget_namesake(name: str, directory: Path) -> None:
    """Two model directories may both have a handler.py; the second must not be given the first's module."""
    known = sys.modules.get(name)
    origin = getattr(known, "__file__", None)
    has_own = (directory / f"{name}.py").exists() or (directory / name).is_dir()
    if not has_own or origin is None or directory in Path(origin).parents:
        return
    for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[loaded]


def _load_error(stage: str, spec: ModelSpec, error: BaseException) -> LoadError:
    words = f"{type(error).__name__}: {presentable(error, _MAX_WORDS)}"
    return LoadError(stage, spec.name, words, "".join(traceback.format_exception(error)))
