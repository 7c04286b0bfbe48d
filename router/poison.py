"""Requests that have killed workers: their content is refused for a while.

A request that killed two is poison. So is a content of which requests, each for itself alone on its worker, have killed three within
some minutes and that none of them survived: those that are not run again (`retry: false`, or answered before the death came) would
else each cost a worker for ever.

The content's hash is taken only when a request of the same model and size is in the table, so ordinary traffic pays a set lookup
at most.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

TTL_S: Final = 3600.0
MAX_ENTRIES: Final = 1024
#: Deaths at the hands of one content, of which no request had two, that make it poison; and within what time. One more than a request
#: needs: frequent contents are there when workers die for other reasons.
CONTENT_DEATHS: Final = 3
CONTENT_S: Final = 600.0
#: How often a success is compared with the contents that are suspected: frequent ones are cleared soon, and nobody pays for others.
_COMPARE_S: Final = 0.01
#: Entries that are shown at a time; the newest count.
MAX_SHOWN: Final = 50


@dataclass(slots=True)
class Entry:
    """One content. `since` and `until` are monotonic seconds."""

    since: float
    until: float
    model: int
    size_bytes: int
    deaths: int
    refused: int = 0


class Poison:
    """A bounded table of content hashes; when it is full the oldest gives way."""

    def __init__(self, *, ttl_s: float = TTL_S, max_entries: int = MAX_ENTRIES) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._entries: dict[bytes, Entry] = {}  # in order of expiry
        self._shapes: Counter[tuple[int, int]] = Counter()  # (model, bytes)
        self._deaths: dict[bytes, list[float]] = {}  # instants by content, the latest content last
        self._compare_at = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def death(self, model: int, frames: Sequence[bytes], now: float) -> int:
        """Note that a worker died while it ran this content and nothing else; return how many have lately."""
        key = _digest(model, frames)
        instants = [at for at in self._deaths.pop(key, ()) if at > now - CONTENT_S][-CONTENT_DEATHS:]
        while len(self._deaths) >= self._max_entries:
            del self._deaths[next(iter(self._deaths))]
        self._deaths[key] = [*instants, now]
        return len(instants) + 1

    @property
    def suspects(self) -> bool:
        """Whether a worker has died of some content alone that nothing is known in favour of."""
        return bool(self._deaths)

    def survived(self, model: int, frames: Sequence[bytes], now: float) -> None:
        """Note that a worker ran this content and lives."""
        if now >= self._compare_at:
            self._compare_at = now + _COMPARE_S
            self._deaths.pop(_digest(model, frames), None)
            if self._deaths and next(reversed(self._deaths.values()))[-1] <= now - CONTENT_S:
                self._deaths.clear()  # all too long ago

    def add(self, model: int, frames: Sequence[bytes], now: float, *, deaths: int = 0) -> str:
        """Refuse this content from now on; returns its hash as people see it."""
        key, shape = _digest(model, frames), _shape(model, frames)
        self._forget(key)
        while len(self._entries) >= self._max_entries:
            self._forget(next(iter(self._entries)))
        self._entries[key] = Entry(now, now + self._ttl_s, *shape, deaths)
        self._shapes[shape] += 1
        return key.hex()

    def holds(self, model: int, frames: Sequence[bytes], now: float) -> str | None:
        """Return the hash of this content if it is refused."""
        self._expire(now)
        if _shape(model, frames) not in self._shapes:
            return None
        entry = self._entries.get(key := _digest(model, frames))
        if entry is None:
            return None
        entry.refused += 1
        return key.hex()

    def shown(self, names: Sequence[str], now: float) -> list[dict[str, Any]]:
        """Return the newest entries for people, the newest first; `names` are the models'."""
        self._expire(now)
        newest = list(self._entries.items())[-MAX_SHOWN:]
        return [
            {
                "hash": key.hex(), "model": names[e.model], "input_bytes": e.size_bytes, "worker_deaths": e.deaths,
                "age_s": round(now - e.since, 3), "expires_in_s": round(e.until - now, 3), "refused": e.refused,
            }
            for key, e in reversed(newest)
        ]  # fmt: skip

    def clear(self, prefix: str = "") -> int:
        """Let contents pass again whose hash begins so; all without. Returns how many."""
        found = [key for key in self._entries if key.hex().startswith(prefix)]
        for key in found:
            self._forget(key)
            self._deaths.pop(key, None)
        return len(found)

    def _expire(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values())).until <= now:
            self._forget(next(iter(self._entries)))

    def _forget(self, key: bytes) -> None:
        if entry := self._entries.pop(key, None):
            shape = entry.model, entry.size_bytes
            self._shapes[shape] -= 1
            if not self._shapes[shape]:
                del self._shapes[shape]


def _shape(model: int, frames: Sequence[bytes]) -> tuple[int, int]:
    return model, sum(map(len, frames))


def _digest(model: int, frames: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(model.to_bytes(8, "big"))
    for frame in frames:  # lengths too: the same bytes cut otherwise are another request
        digest.update(len(frame).to_bytes(8, "big"))
        digest.update(frame)
    return digest.digest()
