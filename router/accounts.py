"""The router's books: every message that is owed a reply is counted in once and out once, by code.

accepted == replied + pending + in flight holds after every event. `ping` and `info` are answered on the spot and not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

#: Reasons come from the supervisor; a bound keeps a bug there from growing the table here.
_MAX_REASONS: Final = 64


class Accounts:
    """Counters since the router started; pending requests are counted where they wait."""

    def __init__(self) -> None:
        self.accepted = 0
        self.in_flight = 0
        self.replied: Counter[str] = Counter()
        self.by_model: dict[str, Counter[str]] = {}  # the same by model; "" for what names none of ours
        self.undeliverable = 0  # replies whose client was gone or did not read
        self.silenced = 0  # malformed messages of a connection that sends nothing else: not answered, so not accepted either
        self.displaced = 0  # waiting requests that were refused to make room for a client with fewer
        self.unretried = 0  # requests that their worker's death ended because the retry budget was used up
        self.late_results = 0  # results of requests that had been answered otherwise, or of nobody's
        self.redispatched: Counter[str] = Counter()

    def refused(self, model: str, code: str) -> None:
        """Count a message that was answered without ever being queued."""
        self.accepted += 1
        self.answered(model, code)

    def answered(self, model: str, code: str) -> None:
        """Count a request that was in the books and is answered."""
        self.replied[code] += 1
        if (codes := self.by_model.get(model)) is None:
            codes = self.by_model[model] = Counter()
        codes[code] += 1

    def redispatch(self, reason: str) -> None:
        """Count a request that came back from a worker and waits again."""
        if reason not in self.redispatched and len(self.redispatched) >= _MAX_REASONS:
            reason = "other"
        self.redispatched[reason] += 1

    def balanced(self, pending: int) -> bool:
        """Whether the books balance with so many requests pending."""
        return self.accepted == self.replied.total() + pending + self.in_flight
