"""One slot of a board in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpupool.board import Phase, SlotRecord


@dataclass
class BoardSlot:
    """One slot of the board: it outlives the processes that write it."""

    incarnation: int = 0
    pid: int = 0
    phase: Phase = Phase.NONE
    since: float = 0.0
    deadline: float = 0.0
    beat: float = 0.0
    batches: int = 0
    limit: int = 0
    service_s: float = 0.0
    rows_running: int = 0
    rows_queued: int = 0
    tickets: list[int] = field(default_factory=list)
    set_batch: float = 1.0  # the supervisor's words
    set_window: float = 1.0

    def record(self) -> SlotRecord:
        """As the supervisor reads it."""
        return SlotRecord(
            self.incarnation, self.pid, self.phase, int(self.since * 1e9), int(self.deadline * 1e9), int(self.beat * 1e9), 0, self.rows_running,
            self.rows_queued, self.limit, int(self.service_s * 1e9), self.batches, 0, 0, 0, 0, 0,
        )  # fmt: skip
