"""One accepted request, from its arrival to its one reply.

The names that `gpupool.link.pack_work` reads (ticket … frames) are those of `link.Work`, so a request is packed as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from gpupool.wire import RequestId

from .tenants import Tenant
from .tracing import Trace

#: No slot has this number: the request has killed no worker yet.
NO_SLOT: Final = -1
#: Returns unbegun, from workers that ended for no known reason, after which a request is suspected of being the reason: a worker can end
#: of a request that it never marked as begun. Two may be bad luck.
SUSPECT_RETURNS: Final = 3


class State(Enum):
    """Where a request is. DONE: answered, though a worker may still hold its ticket."""

    PENDING = 0
    IN_FLIGHT = 1
    DONE = 2


class Request:
    """A request under way. Instants are monotonic seconds; compared and hashed by identity."""

    __slots__ = (
        "arrived", "attempts", "client", "deadline", "deaths", "delimiter", "died_on", "flags", "frames", "id", "incarnation", "model",
        "patient", "priority", "retry", "returns", "rows", "sends", "sent", "sequence", "size", "slot", "state", "tenant", "ticket", "timeout_s",
        "trace", "waited", "waits_since",
    )  # fmt: skip

    def __init__(
        self,
        client: bytes,
        tenant: Tenant,
        request_id: RequestId,
        sequence: int,
        arrived: float,
        deadline: float,
        frames: Sequence[bytes],
        size: int,
        *,
        delimiter: bool = False,
        model: int = 0,
        flags: int = 0,
        rows: int = 1,
        priority: int = 5,
        retry: bool = True,
        patient: bool = False,
    ) -> None:
        self.client = client
        self.tenant = tenant
        self.id = request_id
        self.sequence = sequence  # order of arrival in this router
        self.arrived = arrived
        self.deadline = deadline
        self.frames = frames  # body and buffers; dropped when the request is answered
        self.size = size
        self.delimiter = delimiter
        self.model = model
        self.flags = flags
        self.rows = rows
        self.priority = priority
        self.retry = retry
        self.patient = patient  # named no deadline of its own
        self.state = State.PENDING
        self.ticket = 0  # of its latest dispatch
        self.slot = NO_SLOT  # where it was last sent
        self.incarnation = 0  # of the process there
        self.sent = 0.0  # 0 while it waits
        self.waits_since = arrived  # or since it came back
        self.waited = 0.0  # seconds in the router before that, without those at workers
        self.sends = 0  # to workers; some never began it
        self.timeout_s = 0.0  # what was left when it was last sent
        self.attempts = 0  # executions begun, the first included
        self.deaths = 0  # deaths of workers that were laid at its door
        self.died_on = NO_SLOT
        self.trace: Trace | None = None  # where one is known of
        self.returns = 0  # unbegun, from workers that died or left for no known reason

    def pending(self, now: float) -> float:
        """Return the seconds that it has waited in the router, all its waits together."""
        return self.waited + (self.sent or now) - self.waits_since

    def came_back(self, now: float) -> None:
        """Begin another wait."""
        self.waited = self.pending(now)
        self.sent, self.waits_since = 0.0, now

    @property
    def suspected(self) -> bool:
        """Whether it may be what workers die of: then it runs alone."""
        return self.deaths > 0 or self.returns >= SUSPECT_RETURNS
