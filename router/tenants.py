"""Who shares the router: a client key with all its connections, or one connection that has none.

A tenant's share of the queue, its bounds and its behaviour are counted here, so that one that floods, or sends garbage, harms itself.
"""

from __future__ import annotations

from typing import Final

#: Malformed messages in a row that are answered; after that a connection's garbage is dropped and counted until it sends sense again.
MAX_GARBAGE: Final = 256
#: Connections that are remembered at a time. Beyond it those without open requests are forgotten, oldest first.
MAX_CONNECTIONS: Final = 65536


class Tenant:
    """One party. Counts are of what waits in the backlog; `outstanding` of samples that workers hold."""

    __slots__ = ("max_pending", "max_pending_bytes", "max_priority", "name", "outstanding", "pending", "size_bytes")

    def __init__(self, name: str = "") -> None:
        self.name = name  # of its key; "" for a connection without
        self.pending = 0
        self.size_bytes = 0
        self.outstanding = 0
        self.max_pending: int | None = None
        self.max_pending_bytes: int | None = None
        self.max_priority = 9

    def full_for(self, size: int, limit: int, bytes_limit: int) -> str | None:
        """Say which of its own bounds a newcomer of this size would break; what it was not given is as for all."""
        limit = limit if self.max_pending is None else min(limit, self.max_pending)
        if self.pending >= limit:
            return f"{self.pending} requests of this client are waiting, its limit is {limit}"
        bytes_limit = bytes_limit if self.max_pending_bytes is None else min(bytes_limit, self.max_pending_bytes)
        if self.pending and self.size_bytes + size > bytes_limit:
            return f"{self.size_bytes} bytes of this client are waiting, its limit is {bytes_limit}"
        return None


class Connection:
    """One connection's tenant, and its run of malformed messages."""

    __slots__ = ("garbage", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.garbage = 0
