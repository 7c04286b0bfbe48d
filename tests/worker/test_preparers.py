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
