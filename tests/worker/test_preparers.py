"""Real threads that preprocess, waited for by events with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpupool.spec import ModelSpec
from gpupool.worker.faults import StickyFault
from gpupool.worker.models import LoadError, Model
from gpupool.worker.preparers import Preparers
from gpupool.worker.request import Request

WITHIN_S = 30.0


class Woken:
    """What a link would do: collect when it is woken."""

    def __init__(self, *models: Model, **more: Any) -> None:
        self.there = threading.Event()
        self.preparers = Preparers(models, wake=self.there.set, **more)
        self.preparers.start()

    def collect(self, count: int) -> list[Request]:
        found: list[Request] = []
        end = time.monotonic() + WITHIN_S
        while len(found) < count:
            assert self.there.wait(end - time.monotonic()), f"{len(found)} of {count}"
            self.there.clear()
            found += self.preparers.collect()
        return found


def model(threads: int, preprocess: Callable[[Any], Any] | None) -> Model:
    return Model(ModelSpec("m", preprocess_threads=threads), forward=list, preprocess=preprocess)


def request(ticket: int, *samples: Any, number: int = 0) -> Request:
    now = time.monotonic()
    return Request(ticket, 1, number, len(samples) > 1, False, 5, now + WITHIN_S, now, list(samples))


def test_so_many_samples_are_in_preprocess_at_a_time_as_the_model_allows() -> None:
    met = threading.Barrier(3)
    inside: list[int] = []
    most: list[int] = []

    def meet(sample: int) -> int:
        inside.append(sample)
        most.append(len(inside))
        met.wait(WITHIN_S)
        inside.remove(sample)
        met.wait(WITHIN_S)
        return sample

    woken = Woken(model(3, meet))
    for n in range(9):
        woken.preparers.put(request(n + 1, n))

    assert sorted(r.ticket for r in woken.collect(9)) == list(range(1, 10))
    assert max(most) == 3


def test_a_request_of_few_samples_is_shared_by_all_threads() -> None:
    met = threading.Barrier(4)

    def meet(sample: int) -> int:
        met.wait(WITHIN_S)
        return sample

    woken = Woken(model(4, meet))
    woken.preparers.put(request(1, *range(8)))

    (done,) = woken.collect(1)
    assert (done.failure, done.samples) == (None, list(range(8)))


def test_by_default_it_is_one_at_a_time() -> None:
    inside = threading.Lock()

    def alone(sample: int) -> int:
        assert inside.acquire(blocking=False)
        time.sleep(0)
        inside.release()
        return sample

    woken = Woken(model(ModelSpec("m").preprocess_threads, alone))
    for n in range(200):
        woken.preparers.put(request(n + 1, n))

    done = woken.collect(200)
    assert [r.ticket for r in done] == list(range(1, 201))
    assert {r.failure for r in done} == {None}


def test_each_thread_names_what_it_has_in_its_own_lane() -> None:
    told: list[tuple[int, int]] = []
    met = threading.Barrier(2)

    def meet(sample: int) -> int:
        met.wait(WITHIN_S)
        return sample

    woken = Woken(model(2, meet), beside=lambda ticket, lane: told.append((ticket, lane)))
    for ticket in (7, 8):
        woken.preparers.put(request(ticket, 0))
    woken.collect(2)

    assert {ticket for ticket, _ in told} == {0, 7, 8}
    assert {tuple(bool(t) for t, lane in told if lane == n) for n in (1, 2)} == {(True, False)}


def test_it_is_seen_since_when_a_thread_is_at_one_row() -> None:
    go, begun = threading.Event(), threading.Semaphore(0)

    def wait(sample: int) -> int:
        begun.release()
        assert go.wait(WITHIN_S)
        return sample

    woken = Woken(model(2, wait))
    before = time.monotonic()
    woken.preparers.put(request(1, 0))
    assert begun.acquire(timeout=WITHIN_S)
    ((_, since),) = woken.preparers.busy_since().items()
    assert before <= since <= time.monotonic()
    go.set()
    woken.collect(1)

    assert woken.preparers.busy_since() == {}


def test_a_broken_device_is_told_to_who_collects_and_its_request_stays_named() -> None:
    def broken(sample: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    lanes: dict[int, int] = {}
    woken = Woken(model(1, broken), beside=lambda ticket, lane: lanes.update({lane: ticket}))
    woken.preparers.put(request(5, 0))

    with pytest.raises(StickyFault, match="in preprocess"):
        woken.collect(1)
    assert 5 in lanes.values()


def test_only_models_that_preprocess_have_threads() -> None:
    before = set(threading.enumerate())
    assert Woken(model(4, None)).preparers.threads == 0
    assert set(threading.enumerate()) <= before
    assert Woken(model(4, None), model(2, str), model(1, str)).preparers.threads == 2
    assert sorted(t.name for t in set(threading.enumerate()) - before) == ["prepare-1", "prepare-2", "prepare-3"]


def test_a_thread_that_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(LoadError, match="thread 1 for preprocess: can't start new thread"):
        Woken(model(1, str))


def test_a_hungry_preprocess_makes_room_before_its_error_is_read() -> None:
    relieved = threading.Event()

    def hungry(sample: Any) -> Any:
        raise MemoryError

    woken = Woken(model(1, hungry), relieve=relieved.set)
    woken.preparers.put(request(1, 0))

    (failed,) = woken.collect(1)
    assert failed.failure is not None
    assert failed.failure.code == "out_of_memory"
    assert relieved.is_set()


class Narrow:
    """A preprocess with room for one sample at a time, and for none of size 2."""

    def __init__(self, threads: int) -> None:
        self.met = threading.Barrier(threads)
        self.tries: list[int] = []
        self._inside = 0
        self._lock = threading.Lock()

    def __call__(self, size: int) -> int:
        with self._lock:
            self._inside += 1
            self.tries.append(size)
            company = self._inside > 1 or len(self.tries) <= self.met.parties
        try:
            if len(self.tries) <= self.met.parties:
                self.met.wait(WITHIN_S)
            if company or size > 1:
                raise MemoryError
            return size
        finally:
            with self._lock:
                self._inside -= 1


def test_what_did_not_fit_in_company_is_tried_again_alone() -> None:
    narrow = Narrow(4)
    given_back: list[int] = []
    hungry: list[int] = []
    woken = Woken(model(4, narrow), give_back=lambda: given_back.append(1), hungry=lambda: hungry.append(1))
    for ticket in range(1, 41):
        woken.preparers.put(request(ticket, 1))

    done = woken.collect(40)
    assert {r.failure for r in done} == {None}
    assert len(narrow.tries) >= 44
    assert len(given_back) == len(narrow.tries) - 40
    assert hungry == []


def test_what_does_not_fit_alone_fails_at_the_second_try_and_the_others_do_not() -> None:
    narrow = Narrow(4)
    hungry: list[int] = []
    woken = Woken(model(4, narrow), hungry=lambda: hungry.append(1))
    for ticket in range(1, 41):
        woken.preparers.put(request(ticket, 1 + ticket % 2))

    codes = {r.ticket: r.failure and r.failure.code for r in woken.collect(40)}
    assert codes == {ticket: "out_of_memory" if ticket % 2 else None for ticket in range(1, 41)}
    assert narrow.tries.count(2) == 40
    assert len(hungry) == 20


def test_rows_of_one_request_keep_their_places_and_lengths_over_a_second_try() -> None:
    narrow = Narrow(2)
    loaded = Model(ModelSpec("m", preprocess_threads=2), forward=list, preprocess=narrow, length=lambda sample: 7 + sample)
    woken = Woken(loaded)
    rows = request(1, *[1] * 20)
    rows.bounds = (10,)
    woken.preparers.put(rows)

    (done,) = woken.collect(1)
    assert (done.failure, done.samples, done.length) == (None, [1] * 20, 8)
    assert done.buckets is not None
    assert {bound: sorted(index) for bound, index in done.buckets.items()} == {10: list(range(20))}


@pytest.mark.parametrize("how", ["cancel", "deadline", "clear"])
def test_who_waits_to_be_alone_is_not_held_when_its_request_ends(how: str) -> None:
    """The other thread stays where it is: only its own request waits for that."""
    go, begun, failed = threading.Event(), threading.Event(), threading.Event()

    def hungry_or_slow(sample: str) -> str:
        if sample == "slow":
            begun.set()
            assert go.wait(WITHIN_S)
            return sample
        assert begun.wait(WITHIN_S)
        failed.set()
        raise MemoryError

    woken = Woken(model(2, hungry_or_slow))
    slow, hungry = request(1, "slow"), request(2, "hungry")
    if how == "deadline":
        hungry.deadline = time.monotonic() + 0.5
    woken.preparers.put(slow)
    woken.preparers.put(hungry)
    assert failed.wait(WITHIN_S)
    try:
        if how == "clear":
            woken.preparers.clear()
            third = request(3, "slow")
            woken.preparers.put(third)  # its thread is free again
            end = time.monotonic() + WITHIN_S
            while not third.in_hand:
                assert time.monotonic() < end
                time.sleep(0.001)
        else:
            if how == "cancel":
                assert woken.preparers.cancel(2)
            (ended,) = woken.collect(1)
            assert ended.ticket == 2
            assert ended.failure is not None
            assert ended.failure.code == ("cancelled" if how == "cancel" else "deadline_exceeded")
    finally:
        go.set()
    (after,) = woken.collect(1)
    assert (after.ticket, after.failure) == (3 if how == "clear" else 1, None)
