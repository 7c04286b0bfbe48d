"""Replies whose client does not read fast enough: kept for a short while, within bounds, and offered again.

One slow client costs the others nothing: its replies wait here, in order, and not in a send that blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

MAX_CLIENT_BYTES: Final = 16 << 20
MAX_BYTES: Final = 256 << 20
MAX_AGE_S: Final = 5.0
#: What an entry costs besides its frames, so that many empty replies are bounded too.
_OVERHEAD_BYTES: Final = 512


class Sent(Enum):
    """How an attempt to send went."""

    OK = 0
    BUSY = 1  # its queue is full
    GONE = 2  # no such peer any more


Frames = Sequence[bytes]


class Outbox:
    """Queues by client. A client with an empty queue may always leave one reply, whatever its size."""

    def __init__(
        self, *, max_client_bytes: int = MAX_CLIENT_BYTES, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S
    ) -> None:
        self._max_client_bytes = max_client_bytes
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._queues: dict[bytes, deque[tuple[float, Frames]]] = {}
        self._sizes: dict[bytes, int] = {}
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, client: bytes) -> bool:
        return client in self._queues

    def add(self, frames: Frames, now: float) -> bool:
        """Keep a reply, the client's routing id first; False when the bounds do not allow it."""
        client, size = frames[0], _size(frames)
        held = self._sizes.get(client, 0)
        if held and (held + size > self._max_client_bytes or self.size_bytes + size > self._max_bytes):
            return False
        self._queues.setdefault(client, deque()).append((now, frames))
        self._sizes[client] = held + size
        self.size_bytes += size
        return True

    def drop(self, client: bytes) -> int:
        """Forget what is kept for a client that is gone; return how many replies that were."""
        self.size_bytes -= self._sizes.pop(client, 0)
        return len(self._queues.pop(client, ()))

    def flush(self, send: Callable[[Frames], Sent], now: float) -> int:
        """Offer what is kept again; return how many replies were given up: too old, or their client is gone."""
        given_up = 0
        for client in list(self._queues):
            queue = self._queues.get(client)
            while queue:
                kept_at, frames = queue[0]
                sent = send(frames)  # may tell of connections that ended: this client's, or another's
                if client not in self._queues:
                    break
                if sent is Sent.BUSY and now < kept_at + self._max_age_s:
                    break
                given_up += sent is not Sent.OK
                queue.popleft()
                self._sizes[client] -= _size(frames)
                self.size_bytes -= _size(frames)
            else:
                if client in self._queues:
                    del self._queues[client], self._sizes[client]
        return given_up


def _size(frames: Frames) -> int:
    return sum(map(len, frames)) + _OVERHEAD_BYTES
