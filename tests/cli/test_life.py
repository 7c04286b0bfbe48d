"""The life of a request from log records: the parts of its time, and which records belong to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.cli.life import STAGES, Life, Lives, parts, untold

DURATION = st.floats(0.0, 3.0)


def ms(seconds: float) -> float:
    """As the router rounds."""
    return int(seconds * 1e6 + 0.5) / 1e3


def request(at: float = 1000.0, request_id: str = "a", client: str = "c", **fields: Any) -> dict[str, Any]:
    values = {
        "event": "request", "time": at, "request_id": request_id, "client": client, "ticket": 9, "worker": 1, "code": "ok", "attempts": 1,
        "batch_size": 1, "pending_ms": 0.0, "queue_ms": 0.0, "preprocess_ms": 0.0, "forward_ms": 5.0, "postprocess_ms": 0.0,
        "total_ms": 100.0,
    }  # fmt: skip
    return {**values, **fields}


def move(at: float = 999.95, request_id: str = "a", client: str = "c", **fields: Any) -> dict[str, Any]:
    values = {
        "event": "request_redispatched", "time": at, "request_id": request_id, "client": client, "ticket": 8, "worker": 0,
        "reason": "crash", "pending_ms": 10.0, "held_ms": 40.0,
    }  # fmt: skip
    return {**values, **fields}


@given(
    st.lists(st.tuples(DURATION, DURATION), max_size=4), DURATION, st.tuples(DURATION, DURATION, DURATION, DURATION), DURATION
)
def test_the_parts_add_up_to_the_total_whatever_the_rounding(
    returns: list[tuple[float, float]], pending: float, stages: tuple[float, ...], rest: float
) -> None:
    waited, moves = 0.0, []
    for number, (more, held) in enumerate(returns):
        waited += more
        moves.append(move(ticket=number, pending_ms=ms(waited), held_ms=ms(held)))
    waited += pending
    total = waited + sum(held for _, held in returns) + sum(stages) + rest
    timings: dict[str, Any] = {f"{name}_ms": ms(s) for name, s in zip(STAGES, stages, strict=True)}
    record = request(pending_ms=ms(waited), total_ms=ms(total), ticket=99, **timings)

    split = parts(record, moves)

    assert sum(part.us for part in split) == round(ms(total) * 1e3)
    assert all(part.us >= 0 for part in split)
    assert len(split) == 2 * len(returns) + 6
    shown = {part.name: part.us for part in split}
    assert abs(shown["transport and waiting for reply"] - rest * 1e6) <= 20


def test_a_request_that_came_back_and_was_not_sent_again_waited_for_the_rest() -> None:
    split = parts(
        request(code="deadline_exceeded", batch_size=0, pending_ms=60.0, ticket=8, worker=0, forward_ms=0.0), [move()]
    )

    assert [(p.name, p.us) for p in split] == [("pending", 10_000), ("lost there (crash)", 40_000), ("pending again", 50_000)]


def test_one_without_a_result_was_at_its_worker_unanswered() -> None:
    split = parts(request(code="deadline_exceeded", batch_size=0, pending_ms=10.0, forward_ms=0.0), [])

    assert [(p.name, p.us) for p in split if p.us] == [("pending", 10_000), ("at the worker, unanswered", 90_000)]


def test_one_that_was_never_sent_only_waited() -> None:
    assert [(p.name, p.us) for p in parts(request(worker=None, pending_ms=100.0), [])] == [("pending", 100_000)]


def test_one_that_was_refused_at_the_door_has_no_parts() -> None:
    assert parts({"event": "request", "code": "overloaded"}, []) == []


def test_returns_that_the_log_has_no_line_of_are_counted() -> None:
    assert untold(request(sends=3, attempts=1), [move()]) == 1
    assert untold(request(sends=3), []) == 2
    assert untold(request(sends=2), [move()]) == untold(request(sends=1), []) == untold(request(sends=0, worker=None), []) == 0
    assert untold(request(sends=1, ticket=8), [move(ticket=8)]) == 0  # came back, and waited to its end
    assert untold(request(attempts=2), []) == 0  # of an older pool


def test_a_contradiction_is_shown_not_smoothed() -> None:
    split = parts(request(total_ms=10.0, forward_ms=50.0), [])

    assert sum(part.us for part in split) == 10_000
    assert split[-1].us == -40_000


def found(*records: dict[str, Any], client: str | None = None) -> list[Life]:
    lives = Lives("a", client)
    for record in records:
        lives.take(record)
    return lives.found()


def test_each_client_has_its_own_and_the_newest_comes_first() -> None:
    records = (
        move(client="x"), request(1000.0, client="x"), request(1001.0, client="y", user="alice"), request(1002.0, client="x"),
        request(1003.0, "b"),
    )  # fmt: skip

    assert [(life.end, len(life.moves)) for life in found(*records)] == [(1002.0, 0), (1001.0, 0), (1000.0, 1)]
    assert (
        [life.end for life in found(*records, client="y")] == [life.end for life in found(*records, client="alice")] == [1001.0]
    )


def test_a_request_that_is_not_over_is_known_by_its_return() -> None:
    (life,) = found(move())

    assert life.record is None
    assert life.began == pytest.approx(999.9)


def test_a_return_of_an_earlier_request_whose_line_was_left_out_is_not_laid_at_this_ones_door() -> None:
    mine, other = found(move(900.0), request(1000.0))

    assert (mine.end, mine.moves) == (1000.0, [])
    assert (other.record, other.end) == (None, 900.0)


def test_what_happened_to_its_workers_at_its_time_belongs_to_it() -> None:
    def event(name: str, at: float, worker: int | None, **more: Any) -> dict[str, Any]:
        return {"event": name, "time": at, **({} if worker is None else {"worker": worker}), **more}

    (life,) = found(
        event("worker_spawned", 500.0, 0, device="GPU-a"),
        event("worker_exited", 990.0, 0),  # long before
        event("worker_exited", 999.94, 0),
        event("worker_exited", 999.94, 3),  # another's
        event("limits_set", 999.95, None),
        event("request_poisoned", 999.95, 0, request_id="other", client="c"),
        move(),
        request(),
        event("worker_late", 1000.5, 1),
        event("worker_exited", 1002.0, 1),  # long after
    )

    assert [(e["event"], e["time"]) for e in life.around] == [
        ("worker_exited", 999.94), ("limits_set", 999.95), ("worker_late", 1000.5),
    ]  # fmt: skip
    assert life.devices == {0: "GPU-a"}
    assert life.workers == [0, 1]


def test_memory_is_bounded_and_what_is_left_out_is_counted() -> None:
    lives = Lives("a")
    for n in range(500):
        lives.take(move(1000.0 + n, client=f"gone-{n}"))
        lives.take(request(1000.0 + n, client=f"c{n}"))

    assert len(lives.found()) == 100
    assert lives.left_out == 900
    assert lives.found()[0].end == 1499.0
