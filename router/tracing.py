"""Which requests are traced, and what is kept of one that is. Pure: no clock, no SDK; spans are made of it elsewhere (`spans`).

The decision falls once, when a request comes (head sampling): its client's, by the flag of its traceparent, or else by chance. Almost all
requests are not traced, and cost a comparison each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpupool.link import Marks
from gpupool.spec import TraceSpec

#: https://www.w3.org/TR/trace-context/#traceparent-header-field-values: later versions may have more behind the flags.
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED: Final = 0x01
_SPACE: Final = 1 << 64
#: Dispatches of one request that are remembered. Deaths and returns end it long before; asked departures alone could go on.
MAX_ATTEMPTS: Final = 16


class Parent(NamedTuple):
    """The caller's span, from a traceparent."""

    trace_id: int
    span_id: int
    sampled: bool


def parse_traceparent(text: str) -> Parent | None:
    """Read a W3C traceparent; None for one that is malformed, which is to be ignored."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return None
    parent = Parent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


class Attempt(NamedTuple):
    """A dispatch that came to nothing: its worker died, left, or could not be reached. Instants are monotonic seconds."""

    slot: int
    sent: float
    ended: float
    reason: str


class Trace:
    """A request's place in a trace. One that is not sampled has only its id, for the log."""

    __slots__ = ("attempts", "parent_id", "sampled", "span_id", "trace_id")

    def __init__(self, trace_id: int, span_id: int, parent_id: int, *, sampled: bool) -> None:
        self.trace_id = trace_id
        self.span_id = span_id  # of its root span here; 0 where none is made
        self.parent_id = parent_id  # 0: the trace begins here
        self.sampled = sampled
        self.attempts: list[Attempt] = []

    @property
    def hex(self) -> str:
        """The trace's id as logs and backends show it."""
        return f"{self.trace_id:032x}"

    def came_back(self, slot: int, sent: float, ended: float, reason: str) -> None:
        """Note a dispatch that came to nothing."""
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(Attempt(slot, sent, ended, reason))


class Finished(NamedTuple):
    """A traced request that has been answered: all that its spans are made of. Nothing of its body, nor of an error's words."""

    trace: Trace
    request_id: str
    model: str
    version: str
    slot: int  # that it was last sent to; below 0: none
    code: str
    attempts: int
    rows: int
    priority: int
    input_bytes: int
    arrived: float
    sent: float  # to the worker that it is answered from; 0: it waited when it was answered
    ended: float
    batch_size: int = 0
    preprocess_s: float = 0.0
    forward_s: float = 0.0
    marks: Marks | None = None


class Sampler:
    """Decides. `sample` is the share of the requests whose clients leave it to us; with tracing off nobody is traced."""

    def __init__(self, spec: TraceSpec, rng: random.Random | None = None) -> None:
        self._enabled = bool(spec.endpoint)
        self._rng = rng or random.Random()
        self._max_flagged = spec.max_flagged_per_s
        self._second = 0.0
        self._flagged = 0  # in this second
        self.malformed = 0  # traceparents that were ignored
        self.unheeded = 0  # flags of clients above what is heeded in a second
        self.set_sample(spec.sample)

    def set_sample(self, sample: float) -> None:
        """Trace this share from now on."""
        self._bound = int(sample * _SPACE) if self._enabled else 0
        self.by_chance = self._bound > 0

    def begin(self, traceparent: str | None, now: float) -> Trace | None:
        """Decide about a request; None when nothing is known of any trace."""
        if traceparent is not None:
            if parent := parse_traceparent(traceparent):
                return self._follow(parent, now)
            self.malformed += 1
        if not self.by_chance:
            return None
        low = self._rng.getrandbits(64)
        if low >= self._bound:
            return None
        return Trace(self._rng.getrandbits(64) << 64 | low or 1, self._new_span(), 0, sampled=True)

    def _follow(self, parent: Parent, now: float) -> Trace:
        sampled = self._enabled and parent.sampled
        if sampled and not self._heed(now):
            self.unheeded += 1
            # As if its client had said nothing; by the id, so that other pools that share the trace choose the same ones.
            sampled = parent.trace_id & (_SPACE - 1) < self._bound
        return Trace(parent.trace_id, self._new_span() if sampled else 0, parent.span_id, sampled=sampled)

    def _heed(self, now: float) -> bool:
        if now >= self._second + 1.0:
            self._second, self._flagged = now, 0
        self._flagged += 1
        return self._flagged <= self._max_flagged

    def _new_span(self) -> int:
        return self._rng.getrandbits(64) or 1

    def stats(self) -> dict[str, int]:
        """Say what clients' trace contexts came to nothing."""
        return {"malformed": self.malformed, "unheeded": self.unheeded}


def waiting_times(arrived: float, attempts: Sequence[Attempt], sent: float, ended: float) -> list[tuple[float, float]]:
    """Return when a request waited in the router: until its first dispatch, and after each that came to nothing; `sent` 0: it still did."""
    times, since = [], arrived
    for attempt in attempts:
        times.append((since, attempt.sent))
        since = attempt.ended
    times.append((since, sent or ended))
    return times
