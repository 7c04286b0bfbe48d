"""The queue's bounds, and that a finalizer which logs in the middle of any of its calls neither hangs nor is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpupool.log_queue import LogQueue


class Interrupted(dict[str, Any]):
    """A record that logs another when it is looked at, as a finalizer does which the collector runs at that moment."""

    def __init__(self, act: Callable[[], None], **fields: Any) -> None:
        super().__init__(fields)
        self.act = act

    def get(self, key: str, default: Any = None) -> Any:
        self.act()
        return super().get(key, default)


@pytest.mark.parametrize("call", ["put", "take", "lose"])
def test_a_record_logged_in_the_middle_of_a_call_comes_out(call: str) -> None:
    queue = LogQueue(100)
    armed = [call == "put"]

    def act() -> None:
        if armed[0]:
            armed[0] = False
            queue.put({"event": "finalizer", "level": "warning", "time": 2})

    def work() -> None:
        record = Interrupted(act, event="outer", level="info", time=1)
        if call != "lose":
            queue.put(record)
        if call == "take":
            queue.put({"event": "major", "level": "error", "time": 3})
        armed[0] |= call != "put"
        queue.lose([record]) if call == "lose" else queue.take(1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive(), "hangs"
    assert not armed[0]
    seen = [r["event"] for r in queue.take(10)]
    assert "finalizer" in seen or call == "put"
    assert queue.dropped.total() == (call == "lose")


@pytest.mark.parametrize(
    "value", ["x" * 1000, ["x" * 500, "x" * 500], {"a": {"b": "x" * 1000}}, b"x" * 1000], ids=["str", "list", "dict", "bytes"]
)
def test_what_waits_is_bounded_in_bytes_wherever_they_are(value: Any) -> None:
    queue = LogQueue(1000, 10_000)
    for _ in range(100):
        queue.put({"level": "info", "value": value})
    assert 1 <= len(queue) < 10
    assert queue.dropped["info"] == 100 - len(queue)


def test_a_record_above_the_bound_costs_no_other_and_one_that_holds_itself_is_weighed() -> None:
    queue = LogQueue(1000, 10_000)
    knot: list[Any] = []
    knot.append(knot)
    queue.put({"level": "info", "value": knot})
    queue.put({"level": "error", "value": "x" * 20_000})
    assert len(queue) == 1
    assert queue.dropped == {"error": 1}


def test_after_the_end_all_counts_as_lost() -> None:
    queue = LogQueue(10)
    queue.put({"level": "info"})
    queue.end()
    queue.put({"level": "error"})
    assert queue.dropped == {"info": 1, "error": 1}
