"""One call of a client: a request from the caller's point of view, which may take several messages to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from gpupool.client.reply import Reply
from gpupool.client.trace_context import current_traceparent
from gpupool.errors import GpuPoolError


class InferOptions(TypedDict, total=False):
    """The keywords of `infer`, as `map` and `stream` pass them on."""

    model: str | None
    version: str | None
    timeout: float | None
    priority: int | None
    key: str | None
    retry: bool
    hedge_after: float | None
    trace: str | None


def filled(options: Mapping[str, Any], *, timeout: float, retries: int, hedge_after: float | None) -> dict[str, Any]:
    """Put a client's defaults, and the trace that the caller is in, where a request brings nothing of its own."""
    settings = {**options, "retries": retries}
    if settings.get("timeout") is None:
        settings["timeout"] = timeout
    if settings.get("hedge_after") is None:
        settings["hedge_after"] = hedge_after
    trace = settings.get("trace")
    settings["trace"] = current_traceparent() if trace is None else trace or None
    return settings


def check_hedge_after(hedge_after: float | None) -> None:
    """Refuse what is no time to hedge after.

    Raises:
        ValueError: it is not above 0 seconds.
    """
    if hedge_after is not None and not hedge_after > 0:
        raise ValueError(f"hedge_after: expected seconds above 0, or None, got {hedge_after}")


@dataclass(slots=True, eq=False)
class Attempt:
    """One request on the wire for a call, or about to be."""

    id: str
    call: Call
    sent: bool = False


@dataclass(slots=True, eq=False)
class Call:
    """What a caller waits for, until it has an outcome; `future` belongs to the asyncio client."""

    id: str
    header: dict[str, Any]
    frames: Sequence[bytes]
    timeout: float
    deadline: float
    retries: int
    repeatable: bool
    hedge_after: float | None = None  # seconds; None: never
    #: Those without an answer: none while the call waits to be tried again, two while it is hedged.
    attempts: list[Attempt] = field(default_factory=list)
    failures: int = 0
    not_before: float | None = None  # set while it waits to be tried again
    hedge_at: float | None = None  # set while a hedge is due
    outcome: Reply | GpuPoolError | None = None
    future: Any = None

    @property
    def sent(self) -> bool:
        """Whether the pool may be working on it."""
        return any(attempt.sent for attempt in self.attempts)

    @property
    def next_look(self) -> float:
        """When something about it is due: its end, its retry or its hedge."""
        return min(at for at in (self.deadline, self.not_before, self.hedge_at) if at is not None)

    @classmethod
    def failed(cls, error: GpuPoolError) -> Call:
        """Make the call of a request that could not even be sent."""
        return cls("", {}, (), 0.0, 0.0, 0, repeatable=False, outcome=error)

    def result(self) -> Reply:
        """Return the reply or raise the error; only once there is an outcome."""
        if isinstance(self.outcome, GpuPoolError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome
