"""What a client may send on top of its callers' requests: a share of them, so that retries and hedges never multiply an overload.

A token bucket for each kind, as in gRPC (retry throttling) and Finagle (retry budgets), in place of a count per request alone: when
everything is refused, three retries each would make four times the load of what was too much already.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

#: Retries: a fifth of the requests as in Finagle and Envoy, and one a second for those who send few. The burst lets a whole window
#: of `map` be refused once.
RETRY_SHARE: Final = 0.2
RETRY_BURST: Final = 100.0
RETRIES_PER_S: Final = 1.0
#: Hedges: those slower than the 95th percentile (Dean and Barroso, "The Tail at Scale", 2013).
HEDGE_SHARE: Final = 0.05
HEDGE_BURST: Final = 5.0


class Budget:
    """Each request deposits `share` tokens, each second `per_s`; each message on top of them takes one.

    It begins full, with `burst` tokens, and never holds more. Threads may share one.
    """

    def __init__(self, *, share: float, burst: float, per_s: float = 0.0) -> None:
        self._share = share
        self._burst = burst
        self._per_s = per_s
        self._tokens = burst
        self._filled_at: float | None = None
        self._lock = threading.Lock()

    def deposit(self) -> None:
        """Note a caller's request."""
        with self._lock:
            self._tokens = min(self._burst, self._tokens + self._share)

    def withdraw(self, now: float) -> bool:
        """Take a token; False when there is none. `now` is monotonic seconds."""
        with self._lock:
            if self._filled_at is not None:
                self._tokens = min(self._burst, self._tokens + self._per_s * max(0.0, now - self._filled_at))
            self._filled_at = now
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True


@dataclass(frozen=True, slots=True)
class Budgets:
    """A client's two budgets, shared by all its connections; only requests that may be hedged deposit into that of the hedges."""

    retries: Budget = field(default_factory=lambda: Budget(share=RETRY_SHARE, burst=RETRY_BURST, per_s=RETRIES_PER_S))
    hedges: Budget = field(default_factory=lambda: Budget(share=HEDGE_SHARE, burst=HEDGE_BURST))
