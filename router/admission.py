"""What may wait: the bounds of the backlog in requests and bytes, and who holds most of it.

A tenant's weight is the larger of its shares of the two bounds. Weights add up to two at the most, so a newcomer that itself weighs
its part of that need not look for a heavier one; and after a search has found none, the next waits until as many
newcomers have come as there are tenants: however many connections flood together, a refusal costs the same.
"""

from __future__ import annotations

from typing import Final

from .backlog import Backlog
from .tenants import Tenant

#: A client that is not alone may hold so many times what is free: dynamic thresholds (Choudhury and Hahne, 1998). With n clients that
#: flood, each gets SHARE_OF_FREE parts in n * SHARE_OF_FREE + 1, and one part stays free.
SHARE_OF_FREE: Final = 8
#: Whoever is displaced has waited, and is refused late: not for small differences, as between many clients that flood alike.
HEAVIER: Final = 2.0


class Bounds:
    """The bounds of one backlog. Fewer workers take a share of them: the same backlog would wait longer."""

    def __init__(self, backlog: Backlog, *, max_pending: int, max_pending_bytes: int, client_share: float = 1.0) -> None:
        self._backlog = backlog
        self.max_pending = max_pending
        self.max_pending_bytes = max_pending_bytes
        self.client_share = client_share
        self._share = 1.0
        self.set()
        self._heaviest: Tenant | None = None
        self._rest = 0  # newcomers until the next search

    def set(
        self,
        *,
        max_pending: int | None = None,
        max_pending_bytes: int | None = None,
        client_share: float | None = None,
        share: float | None = None,
    ) -> None:
        """Change the bounds, the part of them that one client may have, or the share in force; what is not given stays."""
        self.max_pending = self.max_pending if max_pending is None else max_pending
        self.max_pending_bytes = self.max_pending_bytes if max_pending_bytes is None else max_pending_bytes
        self.client_share = self.client_share if client_share is None else client_share
        self._share = self._share if share is None else share
        self._limit = max(1, int(self.max_pending * self._share))
        self._bytes_limit = max(1, int(self.max_pending_bytes * self._share))
        self._client_limit = max(1, int(self._limit * self.client_share))
        self._client_bytes_limit = max(1, int(self._bytes_limit * self.client_share))

    def full_for(self, size: int, suspects: int) -> str | None:
        """Say which bound of all a newcomer of this size would break. An empty backlog takes any message that is allowed at all."""
        backlog = self._backlog
        if len(backlog) + suspects >= self._limit:
            return f"{self._limit} requests are waiting, which is the limit"
        if backlog.size_bytes + size > self._bytes_limit and backlog:
            return f"{backlog.size_bytes} bytes are waiting, the limit is {self._bytes_limit}"
        return None

    def full_of(self, tenant: Tenant, size: int, suspects: int) -> str | None:
        """Say which bound of its client a newcomer would break: its own, or, where others wait too, a share of what is free.

        So somebody new always finds a place, and whoever floods is told at once.
        """
        if own := tenant.full_for(size, self._client_limit, self._client_bytes_limit):
            return own
        backlog = self._backlog
        if tenant.pending and backlog.tenant_count > 1:
            # At least a place for this one: where there is none, others may have to make it.
            if tenant.pending >= SHARE_OF_FREE * max(1, self._limit - len(backlog) - suspects):
                return f"{tenant.pending} requests of this client are waiting, and the rest of the queue is for others"
            if tenant.size_bytes + size > SHARE_OF_FREE * max(size, self._bytes_limit - backlog.size_bytes):
                return f"{tenant.size_bytes} bytes of this client are waiting, and the rest of the queue is for others"
        return None

    def fullness(self, suspects: int) -> float:
        """How much of the bounds in force is taken, of the fuller one; 1: all of it."""
        backlog = self._backlog
        return max((len(backlog) + suspects) / self._limit, backlog.size_bytes / self._bytes_limit)

    def overrun(self, suspects: int) -> bool:
        """Whether more waits than the full bounds allow."""
        backlog = self._backlog
        return len(backlog) + suspects > self.max_pending or (backlog.size_bytes > self.max_pending_bytes and len(backlog) > 1)

    def heavier_than(self, tenant: Tenant, size: int) -> Tenant | None:
        """Return a tenant that holds HEAVIER times what this one would with a newcomer of this size; None when none is known."""
        weight = HEAVIER * self._weight(tenant, 1, size)
        tenants = self._backlog.tenant_count
        if not tenants:
            return None
        known = self._heaviest
        if known is not None and known.pending and known is not tenant and self._weight(known) > max(weight, 2 / tenants):
            return known
        if weight * tenants >= 2.0:
            return None
        self._rest -= 1
        if self._rest > 0:
            return None
        found = self.heaviest()
        if found is not tenant and self._weight(found) > weight:
            self._heaviest = found
            return found
        self._rest = tenants
        return None

    def can_give(self, heavier: Tenant, tenant: Tenant, size: int) -> bool:
        """Whether the heavier tenant would still hold more bytes than the other one when it has given up all that a newcomer needs."""
        needed = self._backlog.size_bytes + size - self._bytes_limit
        return needed <= 0 or heavier.size_bytes - needed >= tenant.size_bytes + size

    def heaviest(self) -> Tenant:
        """Return the tenant that holds most; ValueError when none holds anything."""
        return max(self._backlog.tenants, key=self._weight)

    def _weight(self, tenant: Tenant, requests: int = 0, size: int = 0) -> float:
        return max((tenant.pending + requests) / self._limit, (tenant.size_bytes + size) / self._bytes_limit)
