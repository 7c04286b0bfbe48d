"""The error codes of the wire and the exception that each becomes in Python."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Every `code` a reply can bear besides `ok`; retryable ones may succeed unchanged, later or elsewhere."""

    BAD_REQUEST = "bad_request"
    INVALID_INPUT = "invalid_input"
    TOO_LARGE = "too_large"
    UNKNOWN_MODEL = "unknown_model"
    VERSION_MISMATCH = "version_mismatch"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    MODEL_ERROR = "model_error"
    OUT_OF_MEMORY = "out_of_memory"
    WORKER_LOST = "worker_lost"
    POISON = "poison"
    NO_WORKERS = "no_workers"
    DRAINING = "draining"
    INTERNAL = "internal"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when it is sent again."""
        return self in _RETRYABLE


_RETRYABLE = frozenset(
    {
        ErrorCode.OVERLOADED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.WORKER_LOST,
        ErrorCode.NO_WORKERS,
        ErrorCode.DRAINING,
        ErrorCode.INTERNAL,
    }
)


class GpuPoolError(Exception):
    """A request that was not answered `ok`.

    Attributes:
        code: the wire code, see `ErrorCode`.
        retryable: whether the same request may succeed later.
        retry_after_ms: when to try again, if the pool said so.
        field: the input field at fault, if one is.
    """

    code: ErrorCode = ErrorCode.INTERNAL

    def __init__(
        self,
        message: str = "",
        *,
        retry_after_ms: int | None = None,
        field: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.field = field
        self.retryable = self.code.retryable if retryable is None else retryable


class BadRequest(GpuPoolError):
    """The message is not of the protocol."""

    code = ErrorCode.BAD_REQUEST


class InvalidInput(GpuPoolError):
    """The sample is well-formed but not what the model's signature asks for."""

    code = ErrorCode.INVALID_INPUT


class TooLarge(GpuPoolError):
    """Above a size limit; the message names it."""

    code = ErrorCode.TOO_LARGE


class UnknownModel(GpuPoolError):
    """No such model in this pool."""

    code = ErrorCode.UNKNOWN_MODEL


class VersionMismatch(GpuPoolError):
    """The model is there, this version of it is not."""

    code = ErrorCode.VERSION_MISMATCH


class Overloaded(GpuPoolError):
    """A queue is full, or the deadline cannot be met."""

    code = ErrorCode.OVERLOADED


class DeadlineExceeded(GpuPoolError):
    """Time ran out before the reply."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(GpuPoolError):
    """The client cancelled the request."""

    code = ErrorCode.CANCELLED


class ModelError(GpuPoolError):
    """The model's own code raised, or broke its contract."""

    code = ErrorCode.MODEL_ERROR


class OutOfMemory(GpuPoolError):
    """The sample did not fit into the device's memory even alone."""

    code = ErrorCode.OUT_OF_MEMORY


class WorkerLost(GpuPoolError):
    """The worker died with this request and no attempt was left."""

    code = ErrorCode.WORKER_LOST


class Poison(GpuPoolError):
    """This request killed workers; it is refused for a while."""

    code = ErrorCode.POISON


class NoWorkers(GpuPoolError):
    """Nothing is ready to run the request."""

    code = ErrorCode.NO_WORKERS


class Draining(GpuPoolError):
    """The pool is stopping or drained."""

    code = ErrorCode.DRAINING


class Internal(GpuPoolError):
    """A fault of the pool itself."""

    code = ErrorCode.INTERNAL


#: Exception class by code: one each, none missing (a test holds it).
ERRORS: dict[ErrorCode, type[GpuPoolError]] = {
    cls.code: cls
    for cls in (
        BadRequest,
        InvalidInput,
        TooLarge,
        UnknownModel,
        VersionMismatch,
        Overloaded,
        DeadlineExceeded,
        Cancelled,
        ModelError,
        OutOfMemory,
        WorkerLost,
        Poison,
        NoWorkers,
        Draining,
        Internal,
    )
}


def error_from_code(
    code: str,
    message: str = "",
    *,
    retryable: bool | None = None,
    retry_after_ms: int | None = None,
    field: str | None = None,
) -> GpuPoolError:
    """Make the exception for a wire code; a code of a newer pool becomes a plain GpuPoolError that keeps its text."""
    try:
        cls = ERRORS[ErrorCode(code)]
    except ValueError:
        cls, message = GpuPoolError, f"{code}: {message}"
    return cls(message, retryable=retryable, retry_after_ms=retry_after_ms, field=field)
