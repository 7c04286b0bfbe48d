"""One request while this worker has it: what came, what is done, what is missing for its one answer.

Every ticket that was received is answered exactly once: with a result, or back in BYE when its work was never begun. The exceptions
are told by the process's end (the router sees it) and by a new router (the old one's tickets mean nothing to it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gpupool.link import Marks

from .faults import Failure


@dataclass(slots=True, eq=False)
class Request:
    """Only the link thread touches it, but for `samples`, which the inference thread reads, and for what preprocessing finds.

    While it is being preprocessed its threads own it, under their lock.
    """

    ticket: int
    epoch: int  # the router that it came from
    model: int
    many: bool
    alone: bool
    priority: int
    deadline: float  # monotonic seconds
    arrived: float
    samples: list[Any]
    bounds: tuple[int, ...] = ()  # of the length buckets, as they were when it came
    prepared: int = 0  # rows that are or have been in length and preprocess
    in_hand: int = 0  # threads that have rows of it there
    turn: tuple[int, int] = (0, 0)  # among those that wait there
    buckets: dict[int, list[int]] | None = None  # bucket -> its rows, in order; None: all in bucket 0
    length: int = 0  # of the longest sample
    preprocess_s: float = 0.0
    preprocess_from: float = math.inf  # when the first of it began
    outputs: list[Any] = field(default_factory=list)
    missing: int = 0  # rows without an output
    failure: Failure | None = None
    failed_at: int = 0  # the row, where it failed in length or preprocess
    started: bool = False  # the model's preprocess or forward has had some of it
    queue_s: float = 0.0
    forward_s: float = 0.0
    postprocess_s: float = 0.0
    batch_size: int = 0
    answered: bool = False
    traced: bool = False  # its answer is to carry marks
    forward_at: float = 0.0  # when its first batch began
    marks: Marks | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a request that one batcher item stands for; None means all, in order."""

    request: Request
    index: list[int] | None = None

    def samples(self, start: int, stop: int) -> list[Any]:
        """Return the preprocessed samples at positions `start` to `stop` of this part."""
        samples = self.request.samples
        return samples[start:stop] if self.index is None else [samples[i] for i in self.index[start:stop]]

    def rows(self, start: int, stop: int) -> range | list[int]:
        """Return which rows of the request these positions are."""
        return range(start, stop) if self.index is None else self.index[start:stop]
