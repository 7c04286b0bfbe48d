"""The open calls of one connection: what to send, when to try again, when to give up. No socket and no clock in here.

A call is open from `add` until it has an outcome: its reply, an error, or the end of its time. A lost connection puts every call
sent on it back into the queue under its old id: the pool knows a connection by its socket, so the id cannot meet its older self.
Such a resend is not counted as a retry; the call's deadline bounds it.
"""

from __future__ import annotations

import math
import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from gpupool.client.reply import Reply, read_reply
from gpupool.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorCode,
    GpuPoolError,
    Overloaded,
    TooLarge,
    WorkerLost,
    error_from_code,
)
from gpupool.samples import SampleError, pack_body
from gpupool.wire import MAX_ROWS, MAX_TIMEOUT_MS, WireError, pack_request, parse_reply

#: Checked before sending; a pool may be configured to take less, and answers `too_large` then.
MAX_MESSAGE_BYTES: Final = 64 << 20
#: Open calls of one connection; more than that is a caller without a bound of its own.
MAX_OPEN: Final = 65536
DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_RETRIES: Final = 3
#: Wait before retry n: a random part of FIRST * 2**n ("full jitter", Brooker, AWS Architecture Blog 2015), on top of what the pool
#: asked for. Clients refused together must not come back together.
FIRST_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 5.0
#: Answers that mean that the model's code did not run: safe to repeat even for a request that must not run twice.
_NEVER_RAN: Final = frozenset({ErrorCode.OVERLOADED, ErrorCode.NO_WORKERS, ErrorCode.DRAINING})


class InferOptions(TypedDict, total=False):
    """The keywords of `infer`, as `map` passes them on."""

    model: str | None
    version: str | None
    timeout: float | None
    priority: int | None
    key: str | None
    retry: bool
    trace: str | None


@dataclass(slots=True, eq=False)
class Call:
    """One request until it has an outcome; `future` belongs to the asyncio client."""

    id: str
    header: dict[str, Any]
    frames: Sequence[bytes]
    timeout: float
    deadline: float
    retries: int
    repeatable: bool
    failures: int = 0
    sent: bool = False
    not_before: float | None = None  # set while it waits to be tried again
    outcome: Reply | GpuPoolError | None = None
    future: Any = None

    def result(self) -> Reply:
        """Return the reply or raise the error; only once there is an outcome."""
        if isinstance(self.outcome, GpuPoolError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class Calls:
    """The calls of one connection; `endpoint` is for messages only."""

    def __init__(self, endpoint: str, *, rng: random.Random | None = None) -> None:
        self.open: dict[str, Call] = {}
        self.strays = 0  # messages that belong to no open call: late answers mostly
        self._endpoint = endpoint
        self._rng = rng or random.Random()
        self._prefix = os.urandom(4).hex()
        self._last = 0
        self._unsent: deque[Call] = deque()
        # Lower bound of the next moment at which `expire` has work. Calls that end early leave it too low, which costs one look.
        self._due = math.inf

    def infer(
        self,
        sample: object,
        now: float,
        *,
        many: bool = False,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        retry: bool = True,
        **header: Any,
    ) -> Call:
        """Encode a request and open a call for it.

        Raises:
            GpuPoolError: InvalidInput or BadRequest for what cannot be sent, TooLarge, Overloaded.
            ValueError: for a timeout that is none.
        """
        if many:
            if not isinstance(sample, (list, tuple)):
                raise TypeError(f"many: expected a list of samples, got {type(sample).__name__}")
            if len(sample) > MAX_ROWS:
                raise TooLarge(f"many: {len(sample)} samples, the limit is {MAX_ROWS}", field="many")
        try:
            body, buffers = pack_body(sample)
        except SampleError as e:
            raise error_from_code(e.code, str(e), field=e.field or None) from None
        size = len(body) + sum(map(len, buffers))
        if size > MAX_MESSAGE_BYTES:
            raise TooLarge(f"request has {size} bytes, the limit is {MAX_MESSAGE_BYTES}")
        header["many"] = True if many else None
        header["retry"] = None if retry else False
        return self.add(header, [body, *buffers], now, timeout=timeout, retries=retries, repeatable=retry)

    def add(
        self,
        header: dict[str, Any],
        frames: Sequence[bytes],
        now: float,
        *,
        timeout: float,
        retries: int = 0,
        repeatable: bool = True,
    ) -> Call:
        """Open a call for an encoded request; it is sent next."""
        if not 0 < timeout <= MAX_TIMEOUT_MS / 1000:
            raise ValueError(f"timeout: expected seconds above 0 and up to {MAX_TIMEOUT_MS // 1000}, got {timeout}")
        if len(self.open) >= MAX_OPEN:
            raise Overloaded(f"{MAX_OPEN} requests are open on this connection, which is its limit")
        self._last += 1
        call = Call(f"{self._prefix}-{self._last}", header, frames, timeout, now + timeout, retries, repeatable)
        self.open[call.id] = call
        self._unsent.append(call)
        self._due = min(self._due, call.deadline)
        return call

    def next_unsent(self) -> Call | None:
        """The call to send next; stays so until `mark_sent`."""
        while self._unsent:
            call = self._unsent[0]
            if call.outcome is None:
                return call
            self._unsent.popleft()
        return None

    def message(self, call: Call, now: float) -> list[bytes]:
        """The frames of a call, with the time that it has left now."""
        left_ms = max(1, math.ceil((call.deadline - now) * 1000))
        return [pack_request({**call.header, "id": call.id, "timeout_ms": left_ms}), *call.frames]

    def mark_sent(self, call: Call) -> None:
        """Note that the call from `next_unsent` is on its way."""
        assert self._unsent[0] is call
        self._unsent.popleft()
        call.sent = True

    def receive(self, message: Sequence[bytes], now: float) -> Call | None:
        """Take a message from the pool; the call that it ended, if it did end one."""
        try:
            header = parse_reply(message[0])
        except (WireError, IndexError):
            self.strays += 1
            return None
        request_id = header.get("id")
        call = self.open.get(request_id) if type(request_id) is str else None
        if call is None:
            self.strays += 1
            return None
        if header["code"] == "ok":
            return self._end(call, read_reply(call.id, header, message))
        error = error_from_code(
            header["code"],
            str(header.get("message", "")),
            retryable=header.get("retryable"),
            retry_after_ms=header.get("retry_after_ms"),
            field=header.get("field"),
        )
        if self._try_again(call, error, now):
            return None
        return self._end(call, error)

    def disconnected(self) -> list[Call]:
        """The connection broke: queue what was sent on it again; returns the calls that this ended."""
        ended = []
        lost = [call for call in self.open.values() if call.sent]
        for call in lost:
            call.sent = False
            if call.repeatable:
                self._unsent.append(call)
            else:
                words = f"connection to {self._endpoint} lost; whether the request ran is not known, and it must not run twice"
                ended.append(self._end(call, WorkerLost(words, retryable=False)))
        return ended

    def expire(self, now: float) -> list[Call]:
        """End the calls whose time is over and queue those that have waited for their retry.

        The pool may still be working on what ended here while `sent`: send it a `cancel_message`.
        """
        if now < self._due:
            return []
        ended = []
        self._due = math.inf
        for call in list(self.open.values()):
            if call.deadline <= now:
                where = "no reply" if call.sent or call.failures else f"no connection to {self._endpoint}"
                ended.append(self._end(call, DeadlineExceeded(f"{where} within {call.timeout:g} s")))
                continue
            if call.not_before is not None and call.not_before <= now:
                call.not_before = None
                self._unsent.append(call)
            self._due = min(self._due, call.deadline, math.inf if call.not_before is None else call.not_before)
        return ended

    def due(self) -> float:
        """When `expire` should be called next, at the latest; infinite when nothing is open."""
        return self._due if self.open else math.inf

    def abandon(self, call: Call) -> bytes | None:
        """Give a call up; the `cancel` header to send where the pool may be working on it."""
        if call.outcome is not None:
            return None
        self._end(call, Cancelled("given up by the caller"))
        return cancel_message(call) if call.sent else None

    def _try_again(self, call: Call, error: GpuPoolError, now: float) -> bool:
        if not error.retryable or error.code is ErrorCode.DEADLINE_EXCEEDED or call.failures >= call.retries:
            return False
        if not call.repeatable and error.code not in _NEVER_RAN:
            return False
        wait = self._rng.uniform(0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0**call.failures))
        if isinstance(error.retry_after_ms, (int, float)):
            wait += max(0, error.retry_after_ms) / 1000
        if now + wait >= call.deadline:
            return False
        call.failures += 1
        call.sent = False
        call.not_before = now + wait
        self._due = min(self._due, call.not_before)
        return True

    def _end(self, call: Call, outcome: Reply | GpuPoolError) -> Call:
        call.outcome = outcome
        del self.open[call.id]
        return call


def cancel_message(call: Call) -> bytes:
    """The header that tells the pool to drop a request."""
    return pack_request({"type": "cancel", "id": call.id})
