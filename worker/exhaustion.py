"""When memory has got lost, so that only a new process helps: work fails again and again, and more is held at rest than after loading.

Failures alone prove nothing: they come from samples that are too large, which a new process would find as large, and whoever sends them
must not be able to have workers replaced. What is held although nothing runs and nothing waits - a leak, a heap or cache in splinters - a
new one has not. A worker that is never without work cannot be looked at so: then what is held between two batches must do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

#: So many failures within so long a time make suspicious; a suspicion that could not be looked into for as long is judged all the same.
FAILURES: Final = 3
WINDOW_S: Final = 300.0
#: The share of the budget that more must be held at rest than after loading.
GROWN: Final = 0.1
#: Looks in a row that must find so much: what happens to be on its way into this process counts too, and is gone by the next.
LOOKS: Final = 3
#: The supervisor may have reasons to let a worker go on for now: it is asked again.
LOOK_AGAIN_S: Final = 10.0


class Exhaustion:
    """Counts failures for want of memory. Instants in monotonic seconds, sizes in bytes.

    Several threads write: those of the model's code tell what failed, and judge where there is never a moment without work; the beat's judges
    while nothing runs.

    Args:
        writing: entered by whoever writes: a threading.Lock where there are threads.
    """

    def __init__(self, writing: AbstractContextManager[object] | None = None) -> None:
        self.failures = 0  # runs of forward that failed so, and samples that did elsewhere in the model's code
        self.recycle_reason: str | None = None  # for the supervisor
        self._writing = writing or nullcontext()
        self._fixed = 0
        self._budget: Callable[[], int] | None = None
        self._recent: deque[float] = deque(maxlen=FAILURES)
        self._suspected_at: float | None = None
        self._grown_looks = 0
        self._judged_at: float | None = None

    def begin(self, *, fixed_bytes: int, budget_bytes: Callable[[], int]) -> None:
        """Take note of what is held at rest after loading, and of what tells how much there is in all: a reload may change that."""
        self._fixed, self._budget = fixed_bytes, budget_bytes

    def failed(self, runs: int, now: float) -> None:
        """Note a batch of which `runs` runs failed, or a sample that has failed alone."""
        with self._writing:
            self.failures += runs
            self._recent.append(now)
            if self._budget is None or len(self._recent) < FAILURES or now - self._recent[0] > WINDOW_S:
                self._suspected_at = None
            elif self._suspected_at is None:
                self._suspected_at = now

    def suspects(self, now: float) -> bool:
        """Whether to look at what is held, as soon as nothing runs and nothing waits."""
        since, judged_at = self._suspected_at, self._judged_at
        return since is not None and (judged_at is None or now - judged_at >= LOOK_AGAIN_S)

    def overdue(self, now: float) -> bool:
        """Whether to look although something waits: for too long there was no better moment."""
        since = self._suspected_at
        return since is not None and now - max(since, self._judged_at or since) >= WINDOW_S

    def judge(self, at_rest_bytes: int, now: float) -> None:
        """Take a look of `now`; when LOOKS in a row have found more held than a new process would hold, ask for one.

        One that has not clears the suspicion: the samples were to blame, and the count begins anew. A look from before the last failure
        says nothing, nor one that comes when another thread's has cleared the suspicion.
        """
        with self._writing:
            if self._budget is None or self._suspected_at is None or now < self._recent[-1]:
                return
            grown = at_rest_bytes - self._fixed
            if grown <= GROWN * self._budget():
                self._suspected_at = None
                self._recent.clear()
            else:
                self._grown_looks += 1
                if self._grown_looks < LOOKS:
                    return
                span_s = self._recent[-1] - self._recent[0]
                self.recycle_reason = (
                    f"out of memory {FAILURES} times in {span_s:.0f} s, {grown >> 20} MiB more held than after loading"
                )
            self._grown_looks = 0
            self._judged_at = now

    def take_reason(self) -> str | None:
        """Return why this process should be replaced, once; None while there is no reason."""
        with self._writing:
            reason, self.recycle_reason = self.recycle_reason, None
        return reason
