"""The soak's own judges, each shown something that it must condemn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from soak.clients import JUNK, Asked, Job, Raw, judge
from soak.ledger import Ledger
from soak.watch import Memory, unbalanced, went_back

ASKED = Asked(7, 0.0, frozenset({"ok", "overloaded"}), crc=5, kind="a request")
RIGHT = {"n": 7, "crc": 5}


def judged(asked: Asked, code: str, result: Any) -> Counter[str]:
    ledger = Ledger("dealer")
    judge(ledger, asked, {"code": code}, [msgpack.packb(result)])
    return ledger.violations


@pytest.mark.parametrize(
    ("code", "result", "sound"),
    [
        ("ok", RIGHT, True),
        ("overloaded", None, True),
        ("internal", None, False),
        ("ok", {**RIGHT, "n": 8}, False),
        ("ok", {**RIGHT, "crc": 6}, False),
    ],
)
def test_a_reply_must_have_a_code_that_its_request_may_get_and_contents_of_its_own(
    code: str, result: Any, *, sound: bool
) -> None:
    assert (not judged(ASKED, code, result)) is sound


def test_a_many_reply_must_have_all_rows_in_order() -> None:
    asked = Asked(7, 0.0, frozenset({"ok"}), crc=5, rows=2, kind="many")
    rows = [RIGHT, {"n": 8, "crc": 5}]

    assert not judged(asked, "ok", rows)
    assert judged(asked, "ok", rows[:1])
    assert judged(asked, "ok", rows[::-1])


@pytest.fixture
def raw_and_router() -> Iterator[tuple[Raw, zmq.Socket[bytes]]]:
    """A client, and the router's socket in a test's hand."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    raw = Raw(Job("dealer", f"tcp://127.0.0.1:{port}", seed=1, seconds=0.0))
    yield raw, router
    raw.socket.close()
    raw.context.term()
    router.close()
    context.term()


def test_second_replies_and_replies_to_nobody_are_noticed(raw_and_router: tuple[Raw, zmq.Socket[bytes]]) -> None:
    raw, router = raw_and_router
    name = raw.send(Asked(1, 0.0, frozenset({"ok"}), kind="a request"), {"n": 1})
    client = router.recv_multipart()[0]

    def answer(request_id: str | bytes) -> Counter[str]:
        before = raw.ledger.violations.copy()
        header = msgpack.packb({"v": 1, "id": request_id, "code": "ok"})
        router.send_multipart([client, header, msgpack.packb({"n": 1, "crc": 0})])
        raw.take(5.0)
        return raw.ledger.violations - before

    assert not answer(name)
    assert list(answer(name)) == [f"a second reply to {name!r}: ok"]
    assert list(answer("stranger")) == ["a reply to nobody's request 'stranger': ok"]
    assert not answer(JUNK)
    assert raw.ledger.codes == {"ok": 1, "(to rubbish)": 1}


def test_books_must_balance_and_counters_must_not_go_back() -> None:
    books: dict[str, Any] = {"accepted_total": 5, "replied_total": {"ok": 3}, "pending": 1, "in_flight": 1}

    assert not unbalanced(books)
    assert unbalanced({**books, "pending": 2})
    assert not went_back(books, {**books, "pending": 0, "accepted_total": 6, "replied_total": {"ok": 4, "poison": 1}})
    assert went_back(books, {**books, "accepted_total": 4})
    assert went_back(books, {**books, "replied_total": {}})


def test_memory_may_grow_by_its_tolerance_and_no_more() -> None:
    assert Memory(first=40.0, middle=50.0, last=52.0, peak=60.0, allowed=2.0).flat
    assert not Memory(first=40.0, middle=50.0, last=52.1, peak=60.0, allowed=2.0).flat


def test_a_ledger_survives_its_pipe_and_adds_up() -> None:
    one, other = Ledger("req", sent=2), Ledger("req", sent=3, missing=1)
    one.reply("ok", 0.0123)
    other.reply("ok", 0.5)
    other.violation("something")

    copy = Ledger.load(one.dump())
    copy.merge(Ledger.load(other.dump()))

    assert (copy.sent, copy.missing, copy.codes, copy.violations) == (5, 1, {"ok": 2}, {"something": 1})
    assert (copy.percentile_ms(0.0), copy.percentile_ms(0.99)) == (12.3, 500.0)
