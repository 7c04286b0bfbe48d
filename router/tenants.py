"""Who shares the router: a client key with all its connections, or one connection that has none.

A tenant's share of the queue, its bounds and its behaviour are counted here, so that one that floods, or sends garbage, harms itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from weakref import WeakValueDictionary

from gpupool.spec import ClientSpec
from gpupool.wire import MAX_PRIORITY

#: Malformed messages in a row that are answered; after that a connection's garbage is dropped and counted until it sends sense again.
MAX_GARBAGE: Final = 256
#: Connections that are remembered at a time, far above what descriptors allow. Beyond it the oldest is forgotten.
MAX_CONNECTIONS: Final = 65536


class Tenant:
    """One party. Counts are of what waits in the backlog; `outstanding` of samples that workers hold."""

    __slots__ = (
        "__weakref__", "max_pending", "max_pending_bytes", "max_priority", "name", "outstanding", "pending", "served_at",
        "size_bytes", "tags",
    )  # fmt: skip

    def __init__(self, name: str = "") -> None:
        self.name = name  # of its key; "" for a connection without
        self.pending = 0
        self.size_bytes = 0
        self.outstanding = 0
        self.served_at = 0.0  # when it was last given something
        self.tags: dict[int, float] = {}  # by priority: the virtual time at which its last turn ended, see `turns`
        self.bound(ClientSpec())

    def bound(self, spec: ClientSpec) -> None:
        """Take over the bounds of its key; a request of a higher priority than it may have counts as one of that."""
        self.max_pending = spec.max_pending
        self.max_pending_bytes = spec.max_pending_bytes
        self.max_priority = MAX_PRIORITY if spec.max_priority is None else spec.max_priority

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


class Connections:
    """Those that have sent something and are open, and the tenants that have names, as long as any of theirs is there."""

    def __init__(self, clients: Mapping[str, ClientSpec]) -> None:
        self._clients = clients
        self._named: WeakValueDictionary[str, Tenant] = WeakValueDictionary()
        self._open: dict[bytes, Connection] = {}
        self.get = self._open.get

    def meet(self, client: bytes) -> Connection:
        """Know a connection from its first message on."""
        if len(self._open) >= MAX_CONNECTIONS:
            self._open.pop(
                next(iter(self._open))
            )  # met again, and without a name, should it speak; what it has open knows its tenant
        connection = self._open[client] = Connection(Tenant())
        return connection

    def named(self, client: bytes, name: str) -> None:
        """Count a connection to the tenant of this name; what it has open already stays where it was counted."""
        tenant = self._named.get(name)
        if tenant is None:
            tenant = self._named[name] = Tenant(name)
            tenant.bound(self._clients.get(name, ClientSpec()))
        (self._open.get(client) or self.meet(client)).tenant = tenant

    def gone(self, client: bytes) -> None:
        """Forget a connection."""
        self._open.pop(client, None)

    def bound(self, clients: Mapping[str, ClientSpec]) -> None:
        """Put other bounds of clients into force."""
        self._clients = clients
        for name, tenant in self._named.items():
            tenant.bound(clients.get(name, ClientSpec()))

    def tenants(self) -> set[Tenant]:
        """The tenants of all open connections."""
        return {connection.tenant for connection in self._open.values()}
