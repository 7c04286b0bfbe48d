"""What one client sent and what came of it: counts and latencies by code, and whatever was not as promised."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, Self

#: What may become of any good request while workers die and the queue is full. `poison`: two unrelated kills in a row hit it.
ALWAYS: Final = frozenset({"ok", "overloaded", "no_workers", "draining", "worker_lost", "poison"})
#: A deadline that is only missed if something is wrong.
PATIENT_S: Final = 25.0
#: Violations told in words; the rest is counted.
_TOLD: Final = 20


@dataclass(slots=True)
class Ledger:
    """One client's account. Latencies are whole 1/10 ms, so that hundreds of thousands fit through a pipe."""

    kind: str
    sent: int = 0
    missing: int = 0
    junk: int = 0  # messages sent that were no requests
    codes: Counter[str] = field(default_factory=Counter)
    latencies: list[int] = field(default_factory=list)
    violations: Counter[str] = field(default_factory=Counter)

    def reply(self, code: str, latency_s: float) -> None:
        """Count a reply."""
        self.codes[code] += 1
        if code == "ok":
            self.latencies.append(int(latency_s * 10_000))

    def violation(self, words: str) -> None:
        """Note a broken promise."""
        if len(self.violations) >= _TOLD and words not in self.violations:
            words = "more of the like"
        self.violations[words] += 1

    def merge(self, other: Ledger) -> None:
        """Add another client's account of the same kind."""
        self.sent += other.sent
        self.missing += other.missing
        self.junk += other.junk
        self.codes += other.codes
        self.latencies += other.latencies
        self.violations += other.violations

    def percentile_ms(self, share: float) -> float | None:
        """Latency of `ok` replies; None without any."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 10 if ordered else None

    def dump(self) -> str:
        """Encode as one line of JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, text: str) -> Self:
        """Decode what `dump` made."""
        values: dict[str, Any] = json.loads(text)
        values["codes"], values["violations"] = Counter(values["codes"]), Counter(values["violations"])
        return cls(**values)
