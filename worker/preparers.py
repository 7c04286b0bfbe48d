"""The threads that preprocess, beside the inference thread and the link: as many for each model as it allows, started once.

The link puts requests in and collects them; the lock guards the core between it and them. What one of them cannot live with is raised in
the link, which ends the process. A row that falls short of memory is tried again by its thread while no other has one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from .models import LoadError, Model
from .preparing import Preparing
from .request import Request
from .rows import Rows
from .solitude import Solitude


class Preparers:
    """All of them.

    Args:
        models: loaded models by number.
        beside: told of the ticket whose samples the model's code is about to get, and 0 after it, and of the thread's lane, from 1.
        wake: called when there is something to collect.
        relieve: makes room when a preprocess has failed; called by any of the threads.
        give_back: gives back what failures for want of memory have left; called while no thread is in preprocess.
        hungry: told of each sample that did not fit even alone; called likewise.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        models: Sequence[Model],
        beside: Callable[[int, int], None] = lambda *_: None,
        wake: Callable[[], None] = lambda: None,
        relieve: Callable[[], None] = lambda: None,
        give_back: Callable[[], None] = lambda: None,
        hungry: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._beside = beside
        self._wake = wake
        self._relieve = relieve
        self._give_back = give_back
        self._hungry = hungry
        self._clock = clock
        self._core = Preparing()
        self._lock = threading.Lock()
        self._arrived = [threading.Condition(self._lock) for _ in models]
        self._solitude = Solitude()
        self._vacated = threading.Condition(self._lock)  # or what somebody waits for has changed
        self._at_work: dict[int, Rows] = {}  # by lane
        self._broken: BaseException | None = None

    def start(self) -> None:
        """Start the threads: none for a model without preprocess.

        Raises:
            LoadError: when the system gives no thread, or no memory for its stack.
        """
        lane = 0
        for number, model in enumerate(self._models):
            if model.preprocess is None:
                continue
            for _ in range(model.spec.preprocess_threads):
                lane += 1
                thread = threading.Thread(target=partial(self._run, number, lane), name=f"prepare-{lane}", daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as e:
                    raise LoadError("load", model.spec.name, f"thread {lane} for preprocess: {e}") from None

    def put(self, request: Request) -> None:
        """Have a request of at least one sample preprocessed."""
        with self._lock:
            self._core.put(request)
            # One is enough for many rows too: it wakes the next one.
            self._arrived[request.model].notify()

    def cancel(self, ticket: int) -> bool:
        """End a request; False when it is not here. It is collected as cancelled, once no thread has rows of it."""
        with self._lock:
            self._vacated.notify_all()
            return self._core.cancel(ticket)

    def untouched(self) -> list[int]:
        """Forget the requests of which no row was begun; return their tickets."""
        with self._lock:
            return self._core.untouched()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._core.clear()
            self._vacated.notify_all()

    def collect(self) -> list[Request]:
        """Return the requests that are through, prepared or with their failure.

        Raises:
            StickyFault: when preprocessing met an error after which the device is of no more use.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._core.expire(self._clock())
            return self._core.collect()

    @property
    def threads(self) -> int:
        """How many one model has, at the most."""
        return max((m.spec.preprocess_threads for m in self._models if m.preprocess is not None), default=0)

    @property
    def rows(self) -> int:
        """Samples of all requests that are here."""
        with self._lock:
            return self._core.rows

    def look_at(self) -> float:
        """Return when there is, or may be, something to collect: monotonic seconds, 0 for at once, infinity for after a call of `wake`."""
        with self._lock:
            return 0.0 if self._broken is not None or self._core.through else self._core.next_expiry

    def busy_since(self) -> dict[str, float]:
        """Return since when each thread that is at work has been at its present row, in monotonic seconds, by the thread's name."""
        with self._lock:
            return {f"prepare-{lane}": rows.row_began for lane, rows in self._at_work.items() if rows.row_began}

    def step(self, number: int, lane: int, *, wait: bool = False) -> bool:
        """Preprocess the next few rows of a model; False when there is nothing to do, unless told to wait for it."""
        rows = self._take(number, lane, wait=wait)
        if rows is None:
            return False
        self._beside(rows.request.ticket, lane)
        rows.work(self._models[number], self._clock, self._relieve, partial(self._claim, rows), alone=False)
        self._beside(0, lane)
        short = rows.short
        inside = not short or self._again(rows, self._models[number], lane)
        with self._lock:
            if inside:
                self._solitude.leave()
            self._vacated.notify_all()
            if short and self._solitude.open:
                for arrived in self._arrived:
                    arrived.notify_all()
            del self._at_work[lane]
            self._core.done(rows)
            through = self._core.through
        if through:
            self._wake()
        return True

    def _again(self, rows: Rows, model: Model, lane: int) -> bool:
        """Wait until no other thread is inside, and try the last of these rows again; False when it was no longer wanted by then."""
        request = rows.request
        with self._lock:
            self._solitude.want()
            self._vacated.notify_all()
            while request.failure is None and (left := request.deadline - self._clock()) > 0:
                if self._solitude.vacant:
                    self._solitude.begin()
                    break
                self._vacated.wait(left)
            else:
                self._solitude.forgo()
                rows.forgo()
                return False
        self._give_back()
        self._beside(request.ticket, lane)
        rows.again(model, self._clock, self._relieve)
        self._beside(0, lane)
        if rows.hungry:
            self._give_back()
            self._hungry()
        return True

    def _take(self, number: int, lane: int, *, wait: bool) -> Rows | None:
        with self._lock:
            while not self._solitude.open or (rows := self._core.take(number, self._clock())) is None:
                if not wait:
                    return None
                self._arrived[number].wait()
            self._solitude.enter()
            self._at_work[lane] = rows
            if self._core.waits(number):
                self._arrived[number].notify()
            return rows

    def _claim(self, rows: Rows, now: float) -> bool:
        with self._lock:
            return self._solitude.open and self._core.claim(rows, now)

    def _run(self, number: int, lane: int) -> None:
        try:
            while True:
                self.step(number, lane, wait=True)
        except BaseException as e:  # a sticky fault, or a bug of ours; the lane goes on naming the request
            self._broken = e
            self._wake()
