"""Requests that have killed workers twice: their content is refused for a while.

The content's hash is taken only when a request of the same model and size is in the table, so ordinary traffic pays a set lookup
at most.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Final

TTL_S: Final = 3600.0
MAX_ENTRIES: Final = 1024


class Poison:
    """A bounded table of content hashes; when it is full the oldest gives way."""

    def __init__(self, *, ttl_s: float = TTL_S, max_entries: int = MAX_ENTRIES) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._entries: dict[bytes, tuple[float, tuple[int, int]]] = {}  # (until, shape), in order of expiry
        self._shapes: Counter[tuple[int, int]] = Counter()  # (model, bytes)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, model: int, frames: Sequence[bytes], now: float) -> None:
        """Refuse this content from now on."""
        key, shape = _digest(model, frames), _shape(model, frames)
        self._forget(key)
        while len(self._entries) >= self._max_entries:
            self._forget(next(iter(self._entries)))
        self._entries[key] = now + self._ttl_s, shape
        self._shapes[shape] += 1

    def holds(self, model: int, frames: Sequence[bytes], now: float) -> bool:
        """Whether this content is refused."""
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._forget(next(iter(self._entries)))
        return _shape(model, frames) in self._shapes and _digest(model, frames) in self._entries

    def _forget(self, key: bytes) -> None:
        if entry := self._entries.pop(key, None):
            self._shapes[entry[1]] -= 1
            if not self._shapes[entry[1]]:
                del self._shapes[entry[1]]


def _shape(model: int, frames: Sequence[bytes]) -> tuple[int, int]:
    return model, sum(map(len, frames))


def _digest(model: int, frames: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(model.to_bytes(8, "big"))
    for frame in frames:  # lengths too: the same bytes cut otherwise are another request
        digest.update(len(frame).to_bytes(8, "big"))
        digest.update(frame)
    return digest.digest()
