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

_MAX_TRACEBACK: Final = 16_000


class LoadError(Exception):
    """A model cannot be used: `stage` is import, load or warm_up, or config where only another configuration helps."""

    def __init__(self, stage: str, model: str, message: str, trace: str = "") -> None:
        super().__init__(f"model {model}: {stage}: {message}")
        self.stage = stage
        self.message = f"model {model}: {message}"
        self.trace = trace[-_MAX_TRACEBACK:]


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


def warm_up(model: Model, check: Callable[[Any, int], Sequence[Any]]) -> int:
    """Run what warmup() asks for and return how many samples that was. It may return samples to run, or run what it likes itself.

    Args:
        model: a loaded model.
        check: turns what forward returned into one result per sample, or raises.

    Raises:
        LoadError: with stage "warm_up".
    """
    if model.warmup is None:
        return 0
    try:
        with inference_mode():
            samples = list(model.warmup() or ())
            most = model.spec.batching.max_batch
            for at in range(0, len(samples), most):
                batch = samples[at : at + most]
                if model.length is not None:
                    for sample in batch:
                        model.length(sample)
                if model.preprocess is not None:
                    batch = [model.preprocess(sample) for sample in batch]
                for output in check(model.forward(batch), len(batch)):
                    if model.postprocess is not None:
                        model.postprocess(output)
    except BaseException as e:  # the border to the user's model
        raise _load_error("warm_up", model.spec, e) from None
    return len(samples)


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
    try:
        words = f"{type(error).__name__}: {error}"
    except BaseException as e:  # a handler's own exception class may do anything
        words = f"{type(error).__name__} ({type(e).__name__} in str())"
    return LoadError(stage, spec.name, words[:1000], "".join(traceback.format_exception(error)))
