"""The open calls of one connection: what to send, when to try again, when to give up. No socket and no clock in here.

A call is open from `add` until it has an outcome: its reply, an error, or the end of its time. A lost connection puts every call
sent on it back into the queue under its old id: the pool knows a connection by its socket, so the id cannot meet its older self.
Such a resend is not counted as a retry; the call's deadline bounds it.

A call that waits longer than its `hedge_after` is sent a second time, once, under an id of its own. The first good answer, or the
first that nothing can change, ends the call; what else the pool holds of it is cancelled.
"""

from __future__ import annotations

import math
import os
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from gpupool.client.alarms import Alarms
from gpupool.client.budget import Budgets
from gpupool.client.call import Attempt, Call, check_hedge_after
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
#: Ids remembered after their call has ended, to know their late answers by.
MAX_GIVEN_UP: Final = 4096
DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_RETRIES: Final = 3
#: Wait before retry n: a random part of FIRST * 2**n ("full jitter", Brooker, AWS Architecture Blog 2015), on top of what the pool
#: asked for. Clients refused together must not come back together.
FIRST_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 5.0
#: Answers that mean that the model's code did not run, where no execution was begun: safe to repeat even for a request that must not
#: run twice. (A pool that stops answers `draining` to what is running, too.)
_NEVER_RAN: Final = frozenset({ErrorCode.OVERLOADED, ErrorCode.NO_WORKERS, ErrorCode.DRAINING})


class Calls:
    """The calls of one connection; `endpoint` is for messages only. `budgets` are those of the client."""

    def __init__(self, endpoint: str, *, budgets: Budgets | None = None, rng: random.Random | None = None) -> None:
        self.open: dict[str, Call] = {}
        self.strays = 0  # messages that answer nothing we asked
        self.refused = False  # the pool's end refuses to speak to us
        self._endpoint = endpoint
        self._budgets = budgets or Budgets()
        self._rng = rng or random.Random()
        self._prefix = os.urandom(4).hex()
        self._last = 0
        self._attempts: dict[str, Attempt] = {}  # without an answer, by their ids
        self._given_up: dict[str, None] = {}  # in the order in which they were given up
        self._outgoing: deque[Attempt | str] = deque()  # attempts to send, and ids to cancel
        self._alarms = Alarms()  # of each open call: when `expire` has to look at it

    def infer(
        self,
        sample: object,
        now: float,
        *,
        many: bool = False,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        retry: bool = True,
        hedge_after: float | None = None,
        **header: Any,
    ) -> Call:
        """Encode a request and open a call for it.

        Raises:
            GpuPoolError: InvalidInput or BadRequest for what cannot be sent, TooLarge, Overloaded.
            ValueError: for a timeout or a hedge_after that is none.
        """
        check_hedge_after(hedge_after)
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
        call = self.add(header, [body, *buffers], now, timeout=timeout, retries=retries, repeatable=retry)
        if hedge_after is not None and retry:
            call.hedge_after = hedge_after
            self._budgets.hedges.deposit()
        return call

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
        self._queue(Attempt(call.id, call))
        self._alarms.set(call.id, call.deadline)
        self._budgets.retries.deposit()
        return call

    def wants_to_send(self) -> bool:
        """Whether there is a next message."""
        return self._head() is not None

    def next_message(self, now: float) -> list[bytes] | None:
        """Return the frames to send next, requests with the time that they have left now; the same until `mark_sent`."""
        head = self._head()
        if head is None:
            return None
        if isinstance(head, str):
            return [pack_request({"type": "cancel", "id": head})]
        call = head.call
        left_ms = max(1, math.ceil((call.deadline - now) * 1000))
        return [pack_request({**call.header, "id": head.id, "timeout_ms": left_ms}), *call.frames]

    def mark_sent(self, now: float) -> None:
        """Note that the message from `next_message` is on its way."""
        head = self._outgoing.popleft()
        if isinstance(head, str):
            return
        head.sent = True
        if head.call.hedge_after is not None:
            head.call.hedge_at = now + head.call.hedge_after
            self._alarms.set(head.call.id, head.call.next_look)

    def receive(self, message: Sequence[bytes], now: float) -> Call | None:
        """Take a message from the pool; the call that it ended, if it did end one."""
        try:
            header = parse_reply(message[0])
        except (WireError, IndexError):
            self.strays += 1
            return None
        request_id = header.get("id")
        attempt = self._attempts.pop(request_id, None) if type(request_id) is str else None
        if attempt is None:
            if type(request_id) is str and request_id in self._given_up:
                del self._given_up[request_id]
            else:
                self.strays += 1
            return None
        call = attempt.call
        call.attempts.remove(attempt)
        if header["code"] == "ok":
            return self._end(call, read_reply(call.id, header, message))
        error = error_from_code(
            header["code"],
            str(header.get("message", "")),
            retryable=header.get("retryable"),
            retry_after_ms=header.get("retry_after_ms"),
            field=header.get("field"),
        )
        if error.retryable and call.attempts:
            return None  # the other one may still do better
        if self._try_again(call, error, now, began=bool(header.get("attempts"))):
            return None
        return self._end(call, error)

    def disconnected(self) -> list[Call]:
        """The connection broke: queue what was sent on it again; returns the calls that this ended."""
        ended = []
        self._given_up.clear()
        self._outgoing = deque(head for head in self._outgoing if not isinstance(head, str))
        for call in [call for call in self.open.values() if call.sent]:
            again, *_ = call.attempts
            for attempt in call.attempts:
                del self._attempts[attempt.id]
            call.attempts.clear()
            call.hedge_at = None
            if call.repeatable:
                self._queue(Attempt(again.id, call))
            else:
                words = f"connection to {self._endpoint} lost; whether the request ran is not known, and it must not run twice"
                ended.append(self._end(call, WorkerLost(words, retryable=False)))
        return ended

    def expire(self, now: float) -> list[Call]:
        """End the calls whose time is over; queue those that have waited for their retry, and hedges."""
        ended = []
        for call in [self.open[call_id] for call_id in self._alarms.due(now)]:
            if call.deadline <= now:
                where = "no reply" if call.sent or call.failures else self._no_connection()
                ended.append(self._end(call, DeadlineExceeded(f"{where} within {call.timeout:g} s")))
                continue
            if call.not_before is not None and call.not_before <= now:
                call.not_before = None
                self._queue(Attempt(call.id, call))
            if call.hedge_at is not None and call.hedge_at <= now:
                self._hedge(call, now)
            self._alarms.set(call.id, call.next_look)
        return ended

    def _no_connection(self) -> str:
        why = ", which refused the handshake: does it want encryption, another key, or know this one?" if self.refused else ""
        return f"no connection to {self._endpoint}{why}"

    def due(self) -> float:
        """When `expire` should be called next, at the latest; infinite when nothing is open."""
        return self._alarms.next()

    def abandon(self, call: Call) -> None:
        """Give a call up; the pool is told with the next messages."""
        if call.outcome is None:
            self._end(call, Cancelled("given up by the caller"))

    def abandon_all(self) -> list[Call]:
        """Give up every call that is open, and return them."""
        calls = list(self.open.values())
        for call in calls:
            self.abandon(call)
        return calls

    def _head(self) -> Attempt | str | None:
        while self._outgoing:
            head = self._outgoing[0]
            if isinstance(head, str) or self._attempts.get(head.id) is head:
                return head
            self._outgoing.popleft()  # its call has ended
        return None

    def _queue(self, attempt: Attempt) -> None:
        self._attempts[attempt.id] = attempt
        attempt.call.attempts.append(attempt)
        self._outgoing.append(attempt)

    def _hedge(self, call: Call, now: float) -> None:
        call.hedge_at = None
        if self._budgets.hedges.withdraw(now):
            call.hedge_after = None  # once
            self._queue(Attempt(f"{call.id}h", call))

    def _try_again(self, call: Call, error: GpuPoolError, now: float, *, began: bool) -> bool:
        if not error.retryable or error.code is ErrorCode.DEADLINE_EXCEEDED or call.failures >= call.retries:
            return False
        if not call.repeatable and (began or error.code not in _NEVER_RAN):
            return False
        wait = self._rng.uniform(0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0**call.failures))
        if isinstance(error.retry_after_ms, (int, float)):
            wait += max(0, error.retry_after_ms) / 1000
        if now + wait >= call.deadline:
            return False
        if not self._budgets.retries.withdraw(now):
            error.add_note("not tried again: too large a share of this client's requests is being retried already")
            return False
        call.failures += 1
        call.not_before = now + wait
        call.hedge_at = None
        self._alarms.set(call.id, call.next_look)
        return True

    def _end(self, call: Call, outcome: Reply | GpuPoolError) -> Call:
        call.outcome = outcome
        del self.open[call.id]
        self._alarms.remove(call.id)
        for attempt in call.attempts:
            del self._attempts[attempt.id]
            if attempt.sent:  # first in the queue: it makes room in the pool
                self._outgoing.appendleft(attempt.id)
                self._given_up[attempt.id] = None
        while len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        call.attempts.clear()
        return call
