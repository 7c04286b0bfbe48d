"""The real router process between real sockets."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from gpupool import link, wire
from gpupool.board import Word
from gpupool.exits import Exit
from support.router_process import RouterProcess, ask, packed, reply
from support.running import until

Start = Callable[..., RouterProcess]
pytestmark = pytest.mark.processes


def codes_by_id(sock: zmq.Socket[bytes], count: int) -> dict[Any, str]:
    headers = [reply(sock)[0] for _ in range(count)]
    return {h.get("id"): h["code"] for h in headers}


def test_dealer_and_req_clients_are_served(start_router: Start) -> None:
    router = start_router()
    worker, dealer, req = router.worker(), router.client(), router.client(zmq.REQ)

    ask(dealer, b"\x01", b"buffer", id="a")
    ask(req, b"\x02")
    work = worker.work(2)
    worker.answer(*(link.Result(w.ticket, "ok", batch_size=2, frames=w.frames) for w in work))

    header, frames = reply(dealer)
    assert (header["code"], header["id"], header["worker"], frames) == ("ok", "a", 0, [b"\x01", b"buffer"])
    header, frames = reply(req)
    assert (header["code"], frames) == ("ok", [b"\x02"])
    assert router.stats()["replied_total"] == {"ok": 2}


def test_malformed_messages_are_answered_and_the_connection_goes_on_working(start_router: Start) -> None:
    router = start_router(max_message_bytes=1 << 20)
    worker, bad, good = router.worker(), router.client(), router.client()
    header = wire.pack_request({})
    malformed: list[tuple[list[bytes], str]] = [
        ([b""], "bad_request"),
        ([b"", b""], "bad_request"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "bad_request"),
        ([b"\xc1", b"x"], "bad_request"),
        ([b"\xdd\xff\xff\xff\xff"], "bad_request"),
        ([b"\x91" * 1100, b"x"], "bad_request"),
        ([b"x"] * 50, "bad_request"),
        ([header], "bad_request"),
        ([header, *[b"x"] * 300], "bad_request"),
        ([b"\x80\x04\x95pickle.", b"x"], "bad_request"),
        ([os.urandom(1 << 20)], "bad_request"),
        ([header, b"x" * ((1 << 20) + 1)], "too_large"),
    ]

    for frames, code in malformed:
        bad.send_multipart(frames)
        assert bad.poll(2000), f"no reply to {len(frames)} frames"
        answer = bad.recv_multipart()
        assert wire.parse_reply(answer[-2])["code"] == code
        assert answer[-1] == b""
        ask(good)
        worker.echo(worker.work())
        assert reply(good)[0]["code"] == "ok"
    ask(bad, b"x" * (1 << 20), id="fits")
    worker.echo(worker.work())
    assert reply(bad)[0]["code"] == "ok"
    assert router.stats()["replied_total"]["bad_request"] == 11


def test_frame_above_the_hard_cap_cuts_its_own_connection_only(start_router: Start) -> None:
    router = start_router(max_message_bytes=1000)
    worker, bad, good = router.worker(), router.client(), router.client()

    ask(bad, b"x" * 2001)
    ask(good)
    worker.echo(worker.work())
    assert reply(good)[0]["code"] == "ok"
    assert not bad.poll(200)
    ask(bad, b"small", id="later")  # libzmq has connected anew
    worker.echo(worker.work())

    assert reply(bad)[0]["id"] == "later"


def test_junk_on_the_port_harms_nobody(start_router: Start) -> None:
    router = start_router()
    worker, client = router.worker(), router.client()
    host, port = router.bind[0].removeprefix("tcp://").split(":")
    junk = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", random.Random(1).randbytes(1 << 20), b"\xff\x00\x00", b""]

    sockets = [socket.create_connection((host, int(port)), timeout=5) for _ in junk]
    for sock, data in zip(sockets, junk, strict=True):
        try:
            sock.sendall(data)
        except OSError:  # hung up on us already
            continue
    ask(client)
    worker.echo(worker.work())

    assert reply(client)[0]["code"] == "ok"
    for sock in sockets:
        sock.close()


def test_garbage_on_both_sockets_leaves_the_router_alive(start_router: Start) -> None:
    router = start_router()
    worker, client, stranger = router.worker(), router.client(), router.socket()
    stranger.connect(router.spec.workers_endpoint)
    rng = random.Random(7)

    for _ in range(50):
        frames = [rng.randbytes(rng.choice([0, 1, 5, 100])) for _ in range(rng.randint(1, 6))]
        stranger.send_multipart([rng.choice([link.HELLO, link.RESULTS, link.BYE, b"?"]), *frames])
        client.send_multipart([b"\xc1" + frames[0], *frames[1:]])  # never valid, never an empty delimiter
    for _ in range(50):
        assert reply(client)[0]["code"] == "bad_request"
    stranger.send_multipart(link.pack_hello(link.Hello(1, 1, 1, "guessed", 8)))
    ask(client)
    worker.echo(worker.work())

    assert reply(client)[0]["code"] == "ok"
    assert router.stats()["workers"] == {0: 0}
    assert router.log.read_text().count("bad_worker_message") < 10


def test_death_of_a_worker_is_acted_upon_at_once(start_router: Start) -> None:
    router = start_router()
    dead = router.worker(0)
    client = router.client()
    for i in range(8):
        ask(client, id=str(i))
    running = [w.ticket for w in dead.work(8)][:2]
    other = router.worker(1)
    dead.sock.close()

    began = time.monotonic()
    router.tell("lost", slot=0, incarnation=1, running=running, blame=True, reason="signal 9", kind="crash")
    got = other.work()
    assert time.monotonic() - began < 1.0
    alone = 0
    while got:
        alone += sum(bool(w.flags & link.WorkFlag.ALONE) for w in got)
        assert alone <= 2
        assert len(got) == 1 or not any(w.flags & link.WorkFlag.ALONE for w in got)
        other.echo(got)
        got = [] if other.silent(0.2) else other.work()

    assert alone == 2
    assert codes_by_id(client, 8) == {str(i): "ok" for i in range(8)}
    assert router.stats()["redispatched_total"] == {"crash": 8}


def test_last_words_of_a_dead_worker_count(start_router: Start) -> None:
    """Its results were sent before it died: what it finished is not run again."""
    router = start_router()
    worker, client = router.worker(), router.client()
    ask(client, id="a")
    work = worker.work()

    worker.echo(work)
    router.tell("lost", slot=0, incarnation=1, running=[w.ticket for w in work], blame=True, reason="signal 9")

    header, _ = reply(client)
    assert (header["code"], header["attempts"]) == ("ok", 1)


def test_deadlines_are_kept_while_nothing_else_happens(start_router: Start) -> None:
    router = start_router()
    worker, client = router.worker(batch_limit=1), router.client()
    for i in range(5):
        ask(client, id=str(i), timeout_ms=300)

    began = time.monotonic()
    headers = [reply(client)[0] for _ in range(5)]
    assert 0.2 < time.monotonic() - began < 5.0
    assert {h["code"] for h in headers} == {"deadline_exceeded"}
    started = {w.ticket for w in worker.work()}
    while len(worker.cancelled) < len(started):
        worker.receive()
    assert set(worker.cancelled) == started


def test_hold_and_drain_are_reported(start_router: Start) -> None:
    router = start_router()
    worker, client = router.worker(), router.client()
    ask(client, id="a")
    work = worker.work()

    router.tell("hold", slot=0)
    router.tell("drain")
    assert router.stats()["state"] == "draining"  # the two lines are read independently: only now is the client's behind
    ask(client, id="b")
    assert reply(client)[0]["code"] == "draining"
    worker.echo(work)

    assert reply(client)[0]["id"] == "a"
    assert router.expect("idle")["slot"] == 0
    router.expect("drained")
    router.tell("undrain")
    router.tell("release", slot=0)
    assert router.stats()["state"] == "ready"
    ask(client, id="c")
    worker.echo(worker.work())
    assert reply(client)[0]["code"] == "ok"


def test_client_that_does_not_read_costs_the_others_nothing(start_router: Start) -> None:
    router = start_router()
    worker, good = router.worker(), router.client()
    lazy = router.socket()
    for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
        lazy.setsockopt(option, value)
    lazy.connect(router.bind[0])
    body = b"x" * 100_000

    sent = 0
    for i in range(600):
        ask(lazy, b"small", id=str(i))
        for w in worker.work():
            worker.answer(link.Result(w.ticket, "ok", frames=[body]))
            sent += 1
    ask(good, id="good")
    worker.echo(worker.work())

    assert reply(good)[0]["code"] == "ok"
    assert router.stats()["replied_total"]["ok"] == sent + 1


def test_stop_answers_everybody_and_exits_cleanly(start_router: Start) -> None:
    router = start_router()
    router.worker(batch_limit=1)
    client = router.client()
    for i in range(10):
        ask(client, id=str(i))
    while router.stats()["accepted_total"] < 10:
        pass

    router.tell("stop")

    assert codes_by_id(client, 10) == {str(i): "draining" for i in range(10)}
    assert router.process.wait(5) == 0
    lines = router.log.read_text().splitlines()
    assert sum('"event":"request"' in line for line in lines) == 10
    assert any('"event":"router_stopped"' in line for line in lines)


def test_end_of_the_supervisors_line_ends_the_router(start_router: Start) -> None:
    router = start_router()

    router.channel.close()

    assert router.process.wait(5) == Exit.PARENT_GONE


def test_beat_and_log_level_go_over_the_board(start_router: Start) -> None:
    router = start_router()
    client = router.client()
    router.board.set(Word.LOG_LEVEL, 30)

    first = router.board.get(Word.ROUTER_BEAT_NS)
    assert abs(first - time.monotonic_ns()) < 5e9
    end = time.monotonic() + 5
    while router.board.get(Word.ROUTER_BEAT_NS) < first + 1_200_000_000:
        assert time.monotonic() < end, "the router's heart stands still"
        time.sleep(0.02)
    ask(client, id="quiet")
    assert reply(client)[0]["code"] == "no_workers"
    router.tell("stop")
    assert router.process.wait(5) == 0

    assert "quiet" not in router.log.read_text()


def test_settings_and_unknown_messages_do_not_end_the_service(start_router: Start) -> None:
    router = start_router()
    worker, client = router.worker(), router.client()

    router.tell("settings", policy="sideways")
    router.tell("hold")
    router.tell("novelty")
    router.tell("settings", default_timeout_ms=100, policy="round_robin", log_level="debug")
    router.stats()
    ask(client)
    worker.work()

    assert reply(client)[0]["code"] == "deadline_exceeded"
    for _ in until(10.0):  # the log has a thread of its own
        if router.log.read_text().count("bad_supervisor_message") >= 2:
            break
    assert router.log.read_text().count("bad_supervisor_message") == 2


def test_info_tells_models_and_limits(start_router: Start) -> None:
    router = start_router()
    client = router.client()

    client.send_multipart([wire.pack_request({"type": "info", "id": "i"})])

    header, frames = reply(client)
    assert header["code"] == "ok"
    assert packed({"pool": "test"})[1:] in frames[0]


def test_started_by_hand_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "gpupool.router"], capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == Exit.USAGE
    assert "gpupool serve" in done.stderr
