"""The real router's front door: keys, and connections that come and go."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from gpupool import link
from gpupool.exits import Exit
from support.curve import Keypair, Keys, Tap
from support.router_process import FakeWorker, RouterProcess, ask, reply

Start = Callable[..., RouterProcess]
pytestmark = pytest.mark.processes


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


def with_key(router: RouterProcess, keys: Keys, pair: Keypair, **options: Any) -> zmq.Socket[bytes]:
    sock = keys.use(router.socket(), pair, **options)
    sock.connect(router.bind[0])
    return sock


def served(worker: FakeWorker, sock: zmq.Socket[bytes], **header: Any) -> str:
    ask(sock, **header)
    worker.echo(worker.work())
    return str(reply(sock)[0]["code"])


def wait(router: RouterProcess, condition: Callable[[dict[str, Any]], bool], within: float = 10.0) -> dict[str, Any]:
    """Wait until the books fulfil a condition."""
    end = time.monotonic() + within
    while not condition(stats := router.stats()):
        assert time.monotonic() < end, f"not within {within} s: {stats}"
        time.sleep(0.01)
    return stats


def events(router: RouterProcess, name: str) -> list[dict[str, Any]]:
    return [record for record in map(json.loads, router.log.read_text().splitlines()) if record["event"] == name]


def wait_for_event(router: RouterProcess, name: str, within: float = 10.0) -> dict[str, Any]:
    """Wait for the first event of a name: lines are written by a thread, later than the books tell of it."""
    end = time.monotonic() + within
    while not (found := events(router, name)):
        assert time.monotonic() < end, f"no {name}"
        time.sleep(0.02)
    return found[0]


# CURVE


def test_only_a_client_with_an_authorised_key_is_served(start_router: Start, keys: Keys) -> None:
    pair = keys.add("alice")
    router = start_router(curve=keys.spec)
    worker = router.worker()
    right = with_key(router, keys, pair)
    assert served(worker, right) == "ok"

    strangers = {
        "a key that is not authorised": with_key(router, keys, zmq.curve_keypair()),
        "another server's key": with_key(router, keys, pair, server=zmq.curve_keypair()[0]),
        "plaintext": router.client(),
        "plaintext, REQ": router.client(zmq.REQ),
    }
    plain = router.socket()
    plain.plain_username, plain.plain_password = b"alice", b"secret"
    plain.connect(router.bind[0])
    strangers["user and password"] = plain
    for sock in strangers.values():
        ask(sock, b"never")
    wait(router, lambda s: s["handshakes_refused_total"] >= len(strangers))

    for _ in range(20):
        assert served(worker, right) == "ok"
    for name, sock in strangers.items():
        assert not sock.poll(0), name
    stats = router.stats()
    assert (stats["accepted_total"], stats["replied_total"], stats["messages_dropped_total"]) == (21, {"ok": 21}, 0)
    assert stats["curve"] == {"public_key": keys.public.decode(), "client_keys": 1, "bad_files": 0}
    wait_for_event(router, "unknown_client_key")


def test_key_that_is_added_is_served_and_one_that_is_removed_is_shut_out(start_router: Start, keys: Keys) -> None:
    alice, bob = keys.add("alice"), zmq.curve_keypair()
    router = start_router(curve=keys.spec)
    worker = router.worker()
    open_before = with_key(router, keys, alice)
    assert served(worker, open_before) == "ok"

    keys.add("bob", bob)
    wait(router, lambda s: s["curve"]["client_keys"] == 2)
    assert served(worker, with_key(router, keys, bob)) == "ok"

    ask(open_before, id="under way")
    (under_way,) = worker.work()
    keys.remove("alice")
    wait(router, lambda s: s["curve"]["client_keys"] == 1)
    while not worker.cancelled:
        worker.receive()
    assert worker.cancelled == [under_way.ticket]
    worker.echo([under_way])  # it had begun
    refused = router.stats()["handshakes_refused_total"]
    opened_after = with_key(router, keys, alice)
    ask(opened_after)
    for _ in range(3):
        ask(open_before)
    stats = wait(router, lambda s: s["messages_dropped_total"] == 3 and s["handshakes_refused_total"] > refused)
    assert not open_before.poll(0)
    assert not opened_after.poll(0)
    assert worker.silent(0)
    assert (stats["accepted_total"], stats["replied_total"], stats["undeliverable_total"]) == (3, {"ok": 2, "cancelled": 1}, 1)
    wait_for_event(router, "removed_key_talks")
    assert wait_for_event(router, "client_key_removed")["name"] == "alice"

    keys.add("alice", alice)
    wait(router, lambda s: s["curve"]["client_keys"] == 2)
    assert served(worker, open_before) == "ok"
    assert [len(events(router, name)) for name in ("removed_key_talks", "client_key_removed")] == [1, 1]


def test_key_that_is_only_known_by_its_public_half_is_of_no_use(start_router: Start, keys: Keys) -> None:
    """Whoever can read the folder of authorised keys can not impersonate a client with it."""
    public, _ = keys.add("alice")
    router = start_router(curve=keys.spec)
    router.worker()
    thief = with_key(router, keys, (public, zmq.curve_keypair()[1]))
    ask(thief)

    wait(router, lambda s: s["handshakes_refused_total"] >= 1)
    assert router.stats()["accepted_total"] == 0


@pytest.mark.parametrize("encrypted", [True, False])
def test_body_can_be_read_on_the_wire_only_without_curve(start_router: Start, keys: Keys, *, encrypted: bool) -> None:
    marker = os.urandom(64)
    pair = keys.add("alice")
    router = start_router(**({"curve": keys.spec} if encrypted else {}))
    worker, tap = router.worker(), Tap(router.bind[0])
    sock = router.socket()
    if encrypted:
        keys.use(sock, pair)
    sock.connect(tap.endpoint)

    ask(sock, b"\xc4\x40" + marker, id="find me too")
    work = worker.work()
    assert marker in work[0].frames[0]
    worker.echo(work)
    assert marker in reply(sock)[1][0]

    assert len(tap.seen) > 2 * len(marker)
    assert (marker in tap.seen, b"find me too" in tap.seen) == (not encrypted, not encrypted)
    tap.close()


def test_every_address_is_encrypted(start_router: Start, keys: Keys, tmp_path: Path) -> None:
    pair = keys.add("alice")
    path = f"/tmp/gpupool-test-{os.getpid()}.sock"
    router = start_router(curve=keys.spec, bind=("tcp://127.0.0.1:0", f"ipc://{path}"))
    worker = router.worker()

    for address in router.bind:
        plain, right = router.socket(), keys.use(router.socket(), pair)
        plain.connect(address)
        ask(plain)
        right.connect(address)
        assert served(worker, right) == "ok"
    assert router.stats()["accepted_total"] == 2
    os.unlink(path)


@pytest.mark.parametrize("wrong", ["mode", "text", "missing"])
def test_unusable_keys_are_refused_at_the_start(start_router: Start, keys: Keys, wrong: str) -> None:
    expected = {"mode": "chmod 600", "text": "not 40 characters", "missing": "No such file"}[wrong]
    if wrong == "mode":
        keys.secret_file.chmod(0o640)
    elif wrong == "text":
        keys.secret_file.write_text(f'secret-key = "{keys.secret.decode()[:-1]}"')
    else:
        keys.secret_file.unlink()
    router = start_router(curve=keys.spec, up=False)

    assert router.process.wait(10) == Exit.BAD_CONFIG
    told = router.log.read_text()
    assert expected in told
    assert keys.secret.decode()[:-1] not in told


def test_a_router_without_the_folder_of_keys_lets_nobody_in_and_says_so(start_router: Start, keys: Keys) -> None:
    pair = keys.add("alice")
    parked = keys.folder.rename(keys.folder.with_name("parked"))
    router = start_router(curve=keys.spec, log=link_log(keys))
    worker = router.worker()
    assert router.stats()["curve"]["client_keys"] == 0
    parked.rename(keys.folder)

    until = time.monotonic() + 10
    while router.stats()["curve"]["client_keys"] == 0:
        assert time.monotonic() < until
    assert served(worker, with_key(router, keys, pair)) == "ok"


def test_secret_key_is_never_shown(start_router: Start, keys: Keys) -> None:
    pair = keys.add("alice")
    (keys.folder / "leak.key").write_text(keys.secret_file.read_text())
    (keys.folder / "slip.key").write_text(f'secret-key = "{pair[1].decode()}"')
    router = start_router(curve=keys.spec, log=link_log(keys))
    worker = router.worker()
    assert served(worker, with_key(router, keys, pair)) == "ok"
    assert router.stats()["curve"]["bad_files"] == 2
    told = repr(router.stats())
    router.tell("stop")
    assert router.process.wait(10) == Exit.OK

    told += (keys.folder.parent / "log").read_text()
    assert "bad_client_key" in told
    for secret in (keys.secret, pair[1]):
        assert secret.decode() not in told


def link_log(keys: Keys) -> Any:
    """All that a router writes, at its most talkative."""
    from gpupool.spec import LogSpec

    return LogSpec(level="debug", file=str(keys.folder.parent / "log"))


# Connections


def test_requests_of_a_client_that_left_never_run(start_router: Start) -> None:
    router = start_router()
    router.tell("expect", ready=1, coming=1)  # so that requests wait
    router.stats()  # it has heard
    steady = router.client()
    leaver = router.client()
    for i in range(100):
        ask(leaver, b"left %d" % i, id=f"{i}")
    wait(router, lambda s: s["pending"] == 100)
    leaver.close()
    wait(router, lambda s: s["connections"] == 1 or s["pending"] == 0)
    stats = wait(router, lambda s: s["pending"] == 0)
    assert stats["replied_total"] == {"cancelled": 100}
    assert stats["undeliverable_total"] == 100

    worker = router.worker()
    for _ in range(10):
        ask(steady, b"steady")
        work = worker.work()
        assert [list(w.frames) for w in work] == [[b"steady"]]
        worker.echo(work)
        assert reply(steady)[0]["code"] == "ok"
    assert worker.silent()


def test_requests_under_way_are_cancelled_when_their_client_leaves(start_router: Start) -> None:
    router = start_router()
    worker, client = router.worker(), router.client()
    ask(client, id="a")
    work = worker.work()
    client.close()

    assert worker.receive() == link.CANCEL
    assert worker.cancelled == [work[0].ticket]
    worker.echo(work)
    stats = wait(router, lambda s: s["late_results_total"] == 1)
    assert (stats["in_flight"], stats["undeliverable_total"]) == (0, 1)
    assert "Traceback" not in router.log.read_text()


def test_churn_of_clients_that_send_and_leave_mixes_nothing_up(start_router: Start) -> None:
    """Descriptors are used again at once; every message has to be laid at the right connection's door."""
    router = start_router()
    worker, steady = router.worker(), router.client()

    for _ in range(100):
        leavers = [router.socket() for _ in range(3)]
        for leaver in leavers:
            leaver.linger = 100
            leaver.connect(router.bind[0])
            ask(leaver, b"left")
        ask(steady, b"steady")
        for _ in range(1000):
            if worker.sock.poll(10):
                worker.receive()
                worker.echo(worker.got)
                worker.got = []
            if steady.poll(0):
                break
        assert reply(steady)[1] == [b"steady"]
        for leaver in leavers:
            leaver.close()
    stats = wait(router, lambda s: s["connections"] == 1)
    while worker.sock.poll(100):  # what was begun before its client left
        worker.receive()
    assert (stats["pending"], stats["in_flight"]) == (0, 0)
    assert "Traceback" not in router.log.read_text()


def test_client_that_restarts_under_its_routing_id_is_served_at_once(start_router: Start) -> None:
    """Though its last life left requests waiting and running; none of its replies reaches the next."""
    router = start_router()
    worker = router.worker()
    for life in range(50):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # whose end is sure, as that of a process
        client = context.socket(zmq.DEALER)
        client.linger = 0
        client.setsockopt(zmq.IDENTITY, b"app1")
        client.connect(router.bind[0])
        for i in range(40):
            ask(client, b"life %d" % life, id=f"{i}")
        works = worker.work()
        while works[0].frames[0] != b"life %d" % life:  # of the last life, begun before its end was known
            worker.echo(works)
            works = worker.work()
        assert all(w.frames[0] == b"life %d" % life for w in works)
        worker.echo(works[:1])
        header, body = reply(client)
        assert (header["code"], body) == ("ok", [b"life %d" % life])
        worker.echo(works[1:])
        context.destroy(linger=0)
    assert "Traceback" not in router.log.read_text()


def test_second_client_under_a_routing_id_does_not_disturb_the_first(start_router: Start) -> None:
    router = start_router()
    worker = router.worker()
    first = router.client(identity=b"app1")
    ask(first, b"first", id="1")
    (work,) = worker.work()

    second = router.client(identity=b"app1")
    ask(second, b"second", id="1")
    wait(router, lambda s: s["connections"] == 2)
    assert worker.silent(0.2)
    worker.echo([work])
    assert reply(first)[1] == [b"first"]
    assert not second.poll(100)
    assert router.stats()["silent_connections"] == 0  # not yet: it may be about to say something


def test_replies_kept_for_a_slow_client_are_not_kept_for_its_next_life(start_router: Start) -> None:
    router = start_router()
    worker = router.worker()
    slow = router.socket()
    slow.linger = 0
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.setsockopt(zmq.IDENTITY, b"app1")
    slow.connect(router.bind[0])
    for i in range(400):
        ask(slow, b"old" + bytes(64_000), id=f"{i}")
        worker.echo(worker.work())
    slow.close()
    wait(router, lambda s: s["connections"] == 0)  # of two with one identity libzmq drops the later

    new = router.client(identity=b"app1")
    ask(new, b"new", id="0")
    worker.echo(worker.work())
    header, body = reply(new)
    assert (header["code"], body) == ("ok", [b"new"])
    assert not new.poll(100)


def test_connections_are_counted_and_forgotten(start_router: Start) -> None:
    router = start_router()
    worker, client = router.worker(), router.client()
    assert served(worker, client) == "ok"
    host, port = router.bind[0].removeprefix("tcp://").split(":")

    silent = [socket.create_connection((host, int(port)), timeout=5) for _ in range(300)]
    wait(router, lambda s: s["connections"] == 301)
    assert served(worker, client) == "ok"
    for sock in silent:
        sock.close()
    stats = wait(router, lambda s: s["connections"] == 1)
    assert stats["messages_dropped_total"] == 0
    assert served(worker, client) == "ok"


def test_storm_of_connections_leaves_the_others_served(start_router: Start) -> None:
    router = start_router()
    worker, client = router.worker(), router.client()
    assert served(worker, client) == "ok"
    host, port = router.bind[0].removeprefix("tcp://").split(":")

    for _ in range(2000):
        socket.create_connection((host, int(port)), timeout=30).close()
    assert served(worker, client) == "ok"
    wait(router, lambda s: s["connections"] == 1)


def test_handshakes_of_junk_are_counted_as_refused(start_router: Start) -> None:
    router = start_router()
    host, port = router.bind[0].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32))
        wait(router, lambda s: s["handshakes_refused_total"] == 1)
    wait(router, lambda s: s["connections"] == 0)
