"""Measure what a model takes: batches of its warm-up samples, bucket by bucket, until the plan knows enough.

The longest samples come first, for a batch is padded to its longest. An out-of-memory error here is an answer, not a fault.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from .budget import Budget
from .faults import FaultKind, read_fault
from .models import Model, Prepared, inference_mode
from .plan import GroupPlan, Peak, bucket_of, fill_gaps, next_size

#: Runs of one size: the first makes what is made at first use, and the later one counts.
_RUNS: Final = 2


def measure_model(
    number: int,
    model: Model,
    prepared: Sequence[Prepared],
    budget: Budget,
    *,
    room_bytes: int,
    check: Callable[[Any, int], Sequence[Any]],
    progress: Callable[[], None],
) -> dict[tuple[int, int], GroupPlan]:
    """Return the plan of each bucket of a model; empty where there are no warm-up samples, or forward does not bear batches of them.

    Args:
        number: the model's, on the link.
        model: loaded and warm.
        prepared: its warm-up samples, preprocessed.
        budget: of the device.
        room_bytes: what is left of the budget at rest.
        check: turns what forward returned into one result per sample, or raises.
        progress: called after each run.

    Raises:
        NotMeasurable: see `HostBudget.peak_of`.
    """
    batching = model.spec.batching
    by_bucket: dict[int, list[Prepared]] = {}
    for each in prepared:
        by_bucket.setdefault(bucket_of(each.length, batching.length_buckets), []).append(each)

    def peak(samples: Sequence[Any]) -> int | None:
        """The peak of one batch; None when it did not fit."""
        try:
            with inference_mode():
                return budget.peak_of(lambda: check(model.forward(list(samples)), len(samples)))
        except BaseException as e:  # the border to the user's model
            budget.relieve()
            if read_fault(e).kind is not FaultKind.OUT_OF_MEMORY:
                raise
        budget.recover()
        return None

    groups: dict[tuple[int, int], GroupPlan] = {}
    for bucket, members in by_bucket.items():
        longest_first = [m.sample for m in sorted(members, key=lambda m: m.length, reverse=True)]
        peaks: list[Peak] = []
        failed_at = 0
        while (rows := next_size(peaks, most=batching.max_batch, room_bytes=room_bytes)) is not None:
            samples = list(itertools.islice(itertools.cycle(longest_first), rows))
            found = [peak(samples) for _ in range(_RUNS)]
            progress()
            if found[-1] is None:
                failed_at = rows
                break
            peaks.append(Peak(rows, found[-1]))
        if peaks:
            groups[number, bucket] = GroupPlan(tuple(peaks), failed_at)
    return fill_gaps(number, batching.length_buckets, groups)
