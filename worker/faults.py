"""What an exception from a model means: whose fault it is, what the caller is told, and whether this process can go on.

`classify` is pure, on class names, text and error code, so that it needs no card and no torch to be tested. The text of an exception may
quote the client's data; it goes into the reply, never into a log line at the default level. Logs get the class and the place.

Whatever comes from a model's world - an exception's words, its class's name, a field - is made text that every frame can carry, of bounded
length, here: nothing that a model or a client chooses can fail a step behind this one.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Final

from gpupool.errors import ErrorCode, GpuPoolError

MAX_MESSAGE: Final = 500
MAX_FIELD: Final = 200
_MAX_NAME: Final = 100

#: Codes that a handler may choose by raising the class from gpupool.errors: they speak of the input or of the model. The rest are
#: the pool's own words about itself.
_HANDLER_CODES: Final = frozenset(
    {
        ErrorCode.BAD_REQUEST,
        ErrorCode.INVALID_INPUT,
        ErrorCode.TOO_LARGE,
        ErrorCode.OVERLOADED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.MODEL_ERROR,
        ErrorCode.OUT_OF_MEMORY,
    }
)
_OOM_CLASSES: Final = frozenset({"MemoryError", "OutOfMemoryError", "OutOfMemory"})
_OOM_TEXTS: Final = ("out of memory", "cublas_status_alloc_failed", "can't allocate memory")
#: Python's own complaints about values. A message that merely quotes a CUDA error does not cost a process.
_PLAIN_CLASSES: Final = frozenset(
    {"ValueError", "TypeError", "LookupError", "AttributeError", "AssertionError", "ArithmeticError", "NameError", "OSError"}
)
#: After these every later call on the CUDA context fails too; only a new process helps. Texts as the driver words them.
_STICKY_TEXTS: Final = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "launch timed out",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "cuda error: unknown error",
)
#: cudaError_t of the same: ECC, NVLink, illegal address, launch timeout, assert, stack, instruction, alignment, space, pc, launch.
_STICKY_CODES: Final = frozenset({214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719})


class FaultKind(IntEnum):
    """What went wrong; also the board's LAST_ERROR word."""

    NONE = 0
    MODEL = 1  # the model's code raised
    OUT_OF_MEMORY = 2
    STICKY = 3  # the CUDA context is gone
    CONTRACT = 4  # forward returned something that is not one result per sample


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample's or request's end without a result: a wire code and words for the client, made fit to be sent."""

    code: ErrorCode
    message: str
    field: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", presentable(self.message, MAX_MESSAGE))
        object.__setattr__(self, "field", presentable(self.field, MAX_FIELD))

    def in_row(self, row: int) -> Failure:
        """Say which sample of a `many` request this is about."""
        return Failure(self.code, f"sample {row}: {self.message}", self.field)


class StickyFault(Exception):
    """The device is of no more use to this process; carries words for the log."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One exception, read: nothing in it refers to the exception, whose frames keep tensors alive."""

    kind: FaultKind
    failure: Failure
    error: str  # the class's name
    where: str  # file:line in function, of the frame that raised


def presentable(value: object, limit: int) -> str:
    """Return a value as valid, bounded text, whatever it is. Never raises, but for want of memory."""
    try:
        text = str.__str__(
            value if isinstance(value, str) else str(value)
        )  # of a subclass a plain copy: its methods may do anything
    except BaseException as e:
        text = f"<{type.__dict__['__name__'].__get__(type(e))} in str()>"
    text = text if len(text) <= limit else text[:limit] + "…"
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def classify(classes: Collection[str], text: str, error_code: int | None = None) -> FaultKind:
    """Sort an exception by the names of its classes (its own and its bases'), its text, and torch's `error_code` if it has one."""
    if not _OOM_CLASSES.isdisjoint(classes):
        return FaultKind.OUT_OF_MEMORY
    if error_code in _STICKY_CODES:
        return FaultKind.STICKY
    if not _PLAIN_CLASSES.isdisjoint(classes):
        return FaultKind.MODEL
    text = text.lower()
    if any(t in text for t in _STICKY_TEXTS):
        return FaultKind.STICKY
    if any(t in text for t in _OOM_TEXTS):
        return FaultKind.OUT_OF_MEMORY
    return FaultKind.MODEL


def read_fault(error: BaseException) -> Fault:
    """Read an exception from a model's code. Never raises, whatever the exception's own methods do, but for want of memory."""
    name, text = _name(type(error)), presentable(error, MAX_MESSAGE)
    code = _attribute(error, "error_code")
    kind = classify([_name(c) for c in type.mro(type(error))], text, code if type(code) is int else None)
    message = f"{name}: {text}" if text else name
    failure = Failure(ErrorCode.OUT_OF_MEMORY if kind is FaultKind.OUT_OF_MEMORY else ErrorCode.MODEL_ERROR, message)
    if issubclass(type(error), GpuPoolError) and (chosen := _chosen_code(error)) is not None:
        field = _attribute(error, "field")
        failure = Failure(chosen, text or name, "" if field is None else presentable(field, MAX_FIELD))
    return Fault(kind, failure, name, _where(error))


def _chosen_code(error: BaseException) -> ErrorCode | None:
    code = _attribute(error, "code")
    return next((c for c in _HANDLER_CODES if c is code or (type(code) is str and c.value == code)), None)


def _attribute(error: BaseException, name: str) -> object:
    try:
        return getattr(error, name, None)
    except BaseException:  # a property of the model's own
        return None


def _name(cls: type) -> str:
    return presentable(type.__dict__["__name__"].__get__(cls), _MAX_NAME)  # past what a metaclass makes of it


def _where(error: BaseException) -> str:
    trace = _attribute(error, "__traceback__")
    if not isinstance(trace, TracebackType):
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    where = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name}"  # noqa: PTH119 - no Path on this way
    return presentable(where, MAX_FIELD)
