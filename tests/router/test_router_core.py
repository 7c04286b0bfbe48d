"""The core's decisions about clients, deadlines, cancels, drains and stops."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from gpupool import __version__, wire
from gpupool.link import WorkFlag
from gpupool.router.commands import Reply
from gpupool.spec import BatchingSpec, ModelSpec
from support.router_world import CLIENT, RouterWorld, many


def test_request_goes_to_a_worker_and_its_result_back_once() -> None:
    world = RouterWorld()
    peer = world.join()

    world.ask("a", body=b"\x07")
    world.now += 0.25
    world.answer(peer, batch_size=1, queue_s=0.001, forward_s=0.2, length=3)

    header = world.header("a")
    assert world.frames[-1][2] == b"\x07"
    assert (header["code"], header["worker"], header["attempts"]) == ("ok", 0, 1)
    assert (header["model"], header["version"]) == ("echo", "1")
    assert header["timings_ms"] == {
        "pending": 0.0, "queue": 1.0, "preprocess": 0.0, "forward": 200.0, "postprocess": 0.0, "total": 250.0,
    }  # fmt: skip


def test_request_record_bears_sizes_and_times_and_no_content() -> None:
    world = RouterWorld()
    peer = world.join()

    world.ask(b"\x00\x01", body=b"secret")
    world.answer(peer, batch_size=4, length=9, postprocess_s=0.5)

    record = world.records[-1]
    assert record["request_id"] == "0001"
    assert (record["input_bytes"], record["output_bytes"], record["batch_size"], record["length"]) == (6, 6, 4, 9)
    assert record["postprocess_ms"] == 500.0
    assert "secret" not in str(record)


@pytest.mark.parametrize("code", ["model_error", "invalid_input"])
def test_message_of_a_models_error_reaches_the_client_but_not_the_log(code: str) -> None:
    world = RouterWorld()
    peer = world.join()

    world.ask("a")
    world.answer(peer, code=code, message="ValueError: secret", field="x")

    assert world.header("a")["message"] == "ValueError: secret"
    assert world.header("a")["field"] == "x"
    assert "secret" not in str(world.records)


@pytest.mark.parametrize("delimiter", [True, False])
def test_delimiter_of_a_req_socket_is_returned(delimiter: bool) -> None:
    world = RouterWorld()
    peer = world.join()
    frames = [wire.pack_request({"id": "a"}), b"\x01"]

    world.message([b"", *frames] if delimiter else frames)
    world.answer(peer)

    assert (world.frames[-1][1] == b"") is delimiter
    assert len(world.frames[-1]) == (4 if delimiter else 3)


MALFORMED: list[tuple[str, list[bytes], str]] = [
    ("nothing", [], "bad_request"),
    ("delimiter alone", [b""], "bad_request"),
    ("two delimiters", [b"", b""], "bad_request"),
    ("http", [b"GET / HTTP/1.1\r\n"], "bad_request"),
    ("no body", [wire.pack_request({})], "bad_request"),
    ("reserved byte", [b"\xc1", b"\x01"], "bad_request"),
    ("huge array announced", [b"\xdd\xff\xff\xff\xff", b"\x01"], "bad_request"),
    ("huge map announced", [b"\xdf\xff\xff\xff\xff", b"\x01"], "bad_request"),
    ("nested", [b"\x91" * 1100 + b"\x01", b"\x01"], "bad_request"),
    ("too many buffers", [wire.pack_request({}), *[b"x"] * 258], "bad_request"),
    ("pickle", [b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.", b"\x01"], "bad_request"),
    ("many without a list", [wire.pack_request({"many": True}), b"\x81\x01\x02"], "bad_request"),
    ("many rows", [wire.pack_request({"many": True}), b"\xdd\x00\x01\x00\x01" + b"\x01" * 65537], "too_large"),
    ("unknown model", [wire.pack_request({"model": "nope"}), b"\x01"], "unknown_model"),
    ("other version", [wire.pack_request({"model": "other", "version": "6"}), b"\x01"], "version_mismatch"),
    ("version of the default", [wire.pack_request({"version": "2"}), b"\x01"], "version_mismatch"),
    ("cancel of nothing named", [wire.pack_request({"type": "cancel"})], "bad_request"),
]


@pytest.mark.parametrize(("frames", "code"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_malformed_message_is_answered_counted_and_harms_nobody(frames: list[bytes], code: str) -> None:
    world = RouterWorld()
    peer = world.join()

    world.message(frames)

    assert [wire.parse_reply(f[-2])["code"] for f in world.frames] == [code]
    assert world.core.stats(0.0)["replied_total"] == {code: 1}
    assert not world.sent
    world.ask("good")
    world.answer(peer)
    assert world.codes("good") == ["ok"]


def test_message_above_the_limit_is_told_both_numbers() -> None:
    world = RouterWorld(max_message_bytes=100)
    world.join()

    world.message([wire.pack_request({"id": "a"}), b"x" * 50, b"y" * 51])

    assert world.codes() == ["too_large"]
    assert "101" in world.header()["message"]
    assert "100" in world.header()["message"]


def test_message_at_the_limit_is_taken() -> None:
    world = RouterWorld(max_message_bytes=100)
    peer = world.join()

    world.message([wire.pack_request({"id": "a"}), b"x" * 50, b"y" * 50])

    assert world.ids(peer) == ["a"]


def test_clients_may_use_the_same_id_and_get_their_own_results() -> None:
    world = RouterWorld()
    peer = world.join()

    world.ask("1", client=b"A", body=b"\x0a")
    world.ask("1", client=b"B", body=b"\x0b")
    world.answer(peer, reversed(world.tickets(peer)))

    assert {f[0]: f[2] for f in world.frames} == {b"A": b"\x0a", b"B": b"\x0b"}


def test_id_still_open_is_refused_and_the_first_is_answered() -> None:
    world = RouterWorld()
    peer = world.join()

    world.ask("1", body=b"\x0a")
    world.ask("1", body=b"\x0b")
    world.answer(peer)

    assert world.codes("1") == ["bad_request", "ok"]
    assert "already open" in world.replies[CLIENT, "1"][0]["message"]
    world.ask("1")  # answered: the id is free again
    world.answer(peer)
    assert world.codes("1") == ["bad_request", "ok", "ok"]


def test_text_and_bytes_are_different_ids() -> None:
    world = RouterWorld()
    peer = world.join()

    world.ask("1")
    world.ask(b"1")
    world.answer(peer)

    assert world.codes("1") == world.codes(b"1") == ["ok"]


def test_router_makes_ids_of_sixteen_hex_digits() -> None:
    world = RouterWorld()
    peer = world.join()

    for _ in range(3):
        world.message([wire.pack_request({}), b"\x01"])
    world.answer(peer)

    ids = [key[1] for key in world.replies]
    assert len(set(ids)) == 3
    assert all(len(i) == 16 and int(i, 16) >= 0 for i in ids)


def test_ping_is_answered_without_workers_and_not_counted() -> None:
    world = RouterWorld()

    world.message([wire.pack_request({"type": "ping", "id": "p"})])

    assert world.codes("p") == ["ok"]
    assert world.core.stats(0.0)["accepted_total"] == 0


def test_info_names_the_pool_and_its_models() -> None:
    world = RouterWorld()

    world.message([wire.pack_request({"type": "info", "id": "i"})])

    info = msgpack.unpackb(world.frames[-1][2])
    assert (info["pool"], info["version"], info["protocols"]) == ("p", __version__, [1])
    assert [(m["name"], m["versions"], m["current"]) for m in info["models"]] == [("echo", ["1"], "1"), ("other", ["7"], "7")]
    assert info["limits"]["max_message_bytes"] == 64 << 20


def test_pending_request_is_answered_at_its_deadline_and_never_started() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=1)
    for i in range(2):
        world.ask(f"busy{i}")

    world.ask("A", timeout_ms=1000)
    world.advance(0.9)
    assert world.codes("A") == []
    world.advance(0.105)
    assert world.codes("A") == ["deadline_exceeded"]
    world.answer(peer)
    world.answer(peer)

    assert world.codes("A") == ["deadline_exceeded"]
    assert "A" not in [r.id for _, requests in world.sent for r in requests]


def test_deadline_passed_between_ticks_is_not_started_either() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=1)
    world.ask("busy0")
    world.ask("busy1")
    world.ask("A", timeout_ms=1000)

    world.now += 2.0
    world.answer(peer)

    assert world.codes("A") == ["deadline_exceeded"]


def test_request_in_flight_past_its_deadline_is_answered_and_cancelled_at_its_worker() -> None:
    world = RouterWorld()
    peer = world.join()
    world.ask("a", timeout_ms=1000)
    (ticket,) = world.tickets(peer)

    world.advance(1.01)

    assert world.codes("a") == ["deadline_exceeded"]
    assert world.cancels == [(peer, ticket)]
    assert world.core.workers.fleet.by_slot[0].rows == 1  # the worker has it until it says otherwise
    world.answer(peer)
    assert world.codes("a") == ["deadline_exceeded"]
    assert world.core.stats(0.0)["late_results_total"] == 1
    assert world.core.workers.fleet.by_slot[0].rows == 0


def test_worker_gets_what_is_left_of_the_time() -> None:
    world = RouterWorld()
    world.ask("a")  # nobody there yet: refused
    peer = world.join(batch_limit=1)
    world.ask("b", timeout_ms=1000)
    world.ask("c", timeout_ms=1000)
    world.ask("d", timeout_ms=1000)

    world.advance(0.4)
    world.answer(peer, world.tickets(peer)[:1])

    request = list(world.held[peer].values())[-1]
    assert request.id == "d"
    assert request.timeout_s == pytest.approx(0.6)


def test_cancelled_pending_request_is_never_sent() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=1)
    for i in range(2):
        world.ask(f"busy{i}")
    world.ask("x")

    world.message([wire.pack_request({"type": "cancel", "id": "x"})])
    world.answer(peer)
    world.answer(peer)

    assert world.codes("x") == ["cancelled"]
    assert "x" not in [r.id for _, requests in world.sent for r in requests]


def test_cancel_in_flight_is_answered_at_once_and_the_late_result_dropped() -> None:
    world = RouterWorld()
    peer = world.join()
    world.ask("x")

    world.message([wire.pack_request({"type": "cancel", "id": "x"})])
    world.message([wire.pack_request({"type": "cancel", "id": "x"})])
    assert world.codes("x") == ["cancelled"]
    assert len(world.cancels) == 1
    world.answer(peer)

    assert world.codes("x") == ["cancelled"]


def test_cancel_touches_the_clients_own_requests_only() -> None:
    world = RouterWorld()
    peer = world.join()
    world.ask("x", client=b"A")

    world.message([wire.pack_request({"type": "cancel", "id": "x"})], client=b"B")
    world.answer(peer)

    assert world.codes("x", b"A") == ["ok"]
    assert not world.replies[b"B", "x"]


def test_overload_is_refused_with_a_time_to_come_again() -> None:
    world = RouterWorld(max_pending=3)
    peer = world.join(batch_limit=1)
    for i in range(5):
        world.ask(f"r{i}")

    world.ask("over")

    assert world.codes("over") == ["overloaded"]
    assert world.header("over")["retryable"] is True
    assert world.header("over")["retry_after_ms"] > 0
    assert world.core.ledger.pending == 3
    world.answer(peer, world.tickets(peer)[:1])
    world.ask("later")
    assert world.codes("later") == []


def test_bounds_shrink_with_the_pool() -> None:
    world = RouterWorld(max_pending=10)
    world.join(batch_limit=1)
    for i in range(7):
        world.ask(f"r{i}")

    world.core.workers.expect(1, 0, 0.5)
    world.ask("over")
    assert world.codes("over") == ["overloaded"]
    assert "5 requests" in world.header("over")["message"]
    world.core.workers.expect(1, 0, 1.0)
    world.ask("fits")

    assert world.codes("fits") == []


def test_burst_that_fits_into_workers_is_not_overload() -> None:
    """All of it arrives in one drain, before anything could be dispatched."""
    world = RouterWorld(max_pending=10)
    peer = world.join(batch_limit=32)

    for i in range(50):
        world.ask(f"r{i}", step=False)
    world.step()

    assert not world.replies
    assert len(world.held[peer]) == 50


def test_bytes_that_wait_are_bounded_but_a_lone_message_passes() -> None:
    world = RouterWorld(max_pending_bytes=100)
    world.join(batch_limit=1)
    world.ask("busy0")
    world.ask("busy1")

    world.ask("big", body=b"x" * 500)
    world.ask("small")

    assert world.codes("big") == []
    assert world.codes("small") == ["overloaded"]


def test_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=1)
    world.ask("first")
    world.answer(peer, batch_size=1, forward_s=1.0)
    for i in range(12):
        world.ask(f"r{i}")
    world.core.workers.observe([], world.now)

    world.ask("hopeless", timeout_ms=2000)
    world.ask("patient", timeout_ms=60_000)

    assert world.codes("hopeless") == ["overloaded"]
    assert world.header("hopeless")["retry_after_ms"] > 0
    assert world.codes("patient") == []


def test_urgent_request_is_judged_by_what_stands_before_it() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=1)
    world.ask("first")
    world.answer(peer, batch_size=1, forward_s=1.0)
    for i in range(12):
        world.ask(f"r{i}", priority=1)
    world.core.workers.observe([], world.now)

    world.ask("urgent", timeout_ms=5000, priority=9)

    assert world.codes("urgent") == []


def test_nothing_is_refused_early_while_a_worker_is_unknown() -> None:
    world = RouterWorld()
    world.join(batch_limit=1)
    for i in range(50):
        world.ask(f"r{i}")
    world.core.workers.observe([], world.now)

    world.ask("a", timeout_ms=100)

    assert world.codes("a") == []


def test_no_worker_ever_there_is_told_at_once() -> None:
    world = RouterWorld()
    world.core.workers.expect(0, 2)

    world.ask("a")

    assert world.codes() == ["no_workers"]
    assert world.header()["retry_after_ms"] == 1000


def test_requests_wait_for_a_worker_that_is_coming_back() -> None:
    world = RouterWorld()
    world.join()
    world.core.workers.expect(0, 1)
    world.lose(0)

    world.ask("a", timeout_ms=5000)
    assert world.codes() == []
    peer = world.join(0, 2)
    world.answer(peer)

    assert world.codes() == ["ok"]


def test_waiting_requests_are_answered_when_nobody_is_coming_any_more() -> None:
    world = RouterWorld()
    world.join()
    world.core.workers.expect(0, 1)
    world.lose(0)
    world.ask("a")

    world.core.workers.expect(0, 0)
    world.step()

    assert world.codes() == ["no_workers"]


def test_second_router_of_a_pool_waits_for_the_workers_to_find_it() -> None:
    world = RouterWorld(epoch=2)

    world.ask("a")

    assert world.codes() == []


def test_drain_refuses_the_new_finishes_the_old_and_tells_once() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=1)
    for i in range(4):
        world.ask(f"r{i}")

    world.core.drain()
    world.ask("late")
    assert world.codes("late") == ["draining"]
    assert "drained" not in world.told_kinds()
    while world.held[peer]:
        world.answer(peer)

    assert [world.codes(f"r{i}") for i in range(4)] == [["ok"]] * 4
    assert world.told_kinds().count("drained") == 1
    world.step()
    assert world.told_kinds().count("drained") == 1
    world.core.undrain()
    world.ask("again")
    world.answer(peer)
    assert world.codes("again") == ["ok"]


def test_stop_answers_all_that_is_open_and_quits() -> None:
    world = RouterWorld()
    world.join(batch_limit=1)
    for i in range(5):
        world.ask(f"r{i}")

    world.core.stop(world.now)
    world.step()

    assert [world.codes(f"r{i}") for i in range(5)] == [["draining"]] * 5
    assert world.quit
    assert world.core.stats(0.0)["in_flight"] == world.core.stats(0.0)["pending"] == 0


def test_settings_take_hold_at_once() -> None:
    world = RouterWorld()
    world.join(batch_limit=1)
    batching: list[dict[str, Any]] = [{"max_queue": 0}]

    world.core.settings({"max_pending": 1, "default_timeout_ms": 500, "policy": "round_robin", "batching": batching})

    for i in range(2):
        world.ask(f"r{i}")
    world.ask("over")
    assert world.codes("over") == ["overloaded"]
    world.advance(0.51)
    assert world.codes("r0") == world.codes("r1") == ["deadline_exceeded"]


def test_settings_with_an_unknown_policy_change_nothing() -> None:
    world = RouterWorld()

    with pytest.raises(ValueError, match="sideways"):
        world.core.settings({"policy": "sideways", "max_pending": 1})

    assert world.core.ledger.bounds.max_pending == 1000


def test_fault_in_one_message_is_answered_internal(monkeypatch: pytest.MonkeyPatch) -> None:
    world = RouterWorld()
    world.join()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("bug")

    with monkeypatch.context() as patch:
        patch.setattr(world.core._intake, "admit", fail)
        world.ask("a")

    assert world.codes("a") == ["internal"]
    assert "message_failed" in world.events
    world.ask("b")
    assert world.codes("b") == []


def test_many_counts_its_rows_and_finds_a_place_when_it_is_larger_than_any_batch() -> None:
    world = RouterWorld()
    peer = world.join(batch_limit=4)

    world.ask("big", body=many(100), many=True)
    world.ask("next")

    assert world.ids(peer) == ["big"]
    assert world.held[peer][world.tickets(peer)[0]].flags == WorkFlag.MANY
    assert world.core.workers.fleet.by_slot[0].rows == 100


def test_model_is_told_by_its_number() -> None:
    world = RouterWorld(models=(ModelSpec("a"), ModelSpec("b", batching=BatchingSpec())))
    peer = world.join()

    world.ask("x", model="b", version="1")

    assert [r.model for r in world.held[peer].values()] == [1]


def test_stats_count_what_could_not_be_delivered() -> None:
    world = RouterWorld()

    world.core.undelivered(2)

    assert world.core.stats(0.0)["undeliverable_total"] == 2
    assert world.core.stats(0.0)["state"] == "starting"


def test_refusals_count_for_their_model_and_foreign_names_for_none() -> None:
    world = RouterWorld()
    world.ask("a")  # no worker has ever joined
    world.ask("b", model="no such model")
    books = world.core.stats(0.0)
    assert sum(sum(codes.values()) for codes in books["replied_by_model"].values()) == sum(books["replied_total"].values())
    assert books["replied_by_model"][""] == {"unknown_model": 1}
    (named,) = [codes for model, codes in books["replied_by_model"].items() if model]
    assert named == {"no_workers": 1}


def test_what_a_client_that_is_gone_asked_for_never_runs_and_its_replies_are_for_nobody() -> None:
    world = RouterWorld()
    core = world.core
    core.workers.expect(1, 1)  # so that requests wait
    for n, client in enumerate((b"gone", b"here", b"gone")):
        core.message(client, [wire.pack_request({"id": str(n)}), b"x"], world.now)
    answered = [command for command in core.ledger.commands if isinstance(command, Reply)]
    assert not answered

    core.gone(b"gone", world.now)
    replies = [command for command in core.take_commands() if isinstance(command, Reply)]
    assert [(reply.frames, reply.record["code"]) for reply in replies] == [([], "cancelled")] * 2
    assert (core.stats(0.0)["pending"], core.stats(0.0)["undeliverable_total"]) == (1, 2)
    assert core.connections.get(b"gone") is None
    core.gone(b"gone", world.now)
    assert not core.take_commands()


def test_a_stop_says_of_what_may_have_begun_that_it_may() -> None:
    world = RouterWorld()
    world.join(0, batch_limit=1)
    for i in range(4):
        world.ask(f"r{i}", retry=False)
    world.core.stop(world.now)
    world.step()

    assert [world.header(f"r{i}")["attempts"] for i in range(4)] == [1, 1, 0, 0]


def test_reply_that_was_not_sent_when_its_client_went_is_not_sent_to_the_next_under_its_id() -> None:
    world = RouterWorld()
    core = world.core
    core.message(b"gone", [b"junk"], world.now)
    core.message(b"here", [b"junk"], world.now)

    core.gone(b"gone", world.now)
    replies = [command for command in core.take_commands() if isinstance(command, Reply)]
    assert [reply.frames[:1] for reply in replies] == [[], [b"here"]]
    assert core.stats(0.0)["undeliverable_total"] == 1
