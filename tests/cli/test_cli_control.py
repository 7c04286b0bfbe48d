"""Asking a pool ends in time, with words, whatever sits at the other end of the socket."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpupool.cli.control import TIMEOUT_S, ask, status_of
from gpupool.cli.output import Failure
from gpupool.exits import Exit
from gpupool.paths import RuntimeDir
from support.fake_pool import Answer, FakePool, document, ok, refusal, steady


def failed(runtime: Path, *, timeout_s: float = 2.0, **arguments: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        ask(RuntimeDir(runtime), "status", timeout_s=timeout_s, **arguments)
    return caught.value


def test_the_verb_and_its_arguments_reach_the_pool_and_the_result_comes_back() -> None:
    with FakePool(steady({"workers": []})) as pool:
        assert ask(RuntimeDir(pool.folder), "restart", workers=["0", "cpu:1"], force=True) == {"workers": []}

    assert pool.asked == [{"verb": "restart", "workers": ["0", "cpu:1"], "force": True}]


def test_a_refusal_keeps_the_pools_code_and_words() -> None:
    with FakePool(lambda _: refusal("unknown_worker", "no worker '7'", known=[0])) as pool:
        failure = failed(pool.folder)

    assert (failure.code, failure.message, failure.exit_code) == ("unknown_worker", "no worker '7'", Exit.FAILED)
    assert failure.details == {"known": [0]}


def test_no_socket_is_told_with_its_path(tmp_path: Path) -> None:
    failure = failed(tmp_path)

    assert (failure.code, failure.exit_code) == ("unreachable", Exit.UNREACHABLE)
    assert str(tmp_path / "control.sock") in failure.message


def test_a_socket_that_nobody_listens_on_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(tmp_path / "control.sock"))

    assert "refused" in failed(tmp_path).message


def test_a_runtime_directory_too_long_for_a_socket_is_told_with_the_limit(tmp_path: Path) -> None:
    failure = failed(tmp_path / ("x" * 100))

    assert failure.exit_code == Exit.UNREACHABLE
    assert "the limit is 107" in failure.message


@contextmanager
def somebody_else() -> Iterator[None]:
    """Become a user who may not enter our directories; root may everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission_is_told_as_such() -> None:
    with FakePool(steady(document())) as pool:
        pool.folder.chmod(0o700 if os.geteuid() == 0 else 0)
        with somebody_else():
            failure = failed(pool.folder)
        pool.folder.chmod(0o700)

    assert (failure.code, failure.exit_code) == ("permission_denied", Exit.UNREACHABLE)
    assert str(pool.folder) in failure.message


def test_a_silent_pool_is_given_up() -> None:
    with FakePool(lambda _: None) as pool:
        started = time.monotonic()
        failure = failed(pool.folder, timeout_s=0.3)

    assert (failure.code, failure.exit_code) == ("unreachable", Exit.UNREACHABLE)
    assert "did not answer within 0.3 s" in failure.message
    assert 0.25 < time.monotonic() - started < 2


def test_a_command_ends_within_five_seconds_of_its_start() -> None:
    assert TIMEOUT_S <= 4.5


def test_a_trickle_of_bytes_does_not_extend_the_time() -> None:
    stop = threading.Event()

    def trickle(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            while not stop.wait(0.05):
                peer.send(b" ")

    with FakePool(lambda _: None) as pool:
        (pool.folder / "control.sock").unlink()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(pool.folder / "control.sock"))
            server.listen(1)
            thread = threading.Thread(target=trickle, args=(server,))
            thread.start()
            started = time.monotonic()
            failure = failed(pool.folder, timeout_s=0.4)
            took = time.monotonic() - started
            stop.set()
            thread.join(5)

    assert failure.exit_code == Exit.UNREACHABLE
    assert took < 2


def test_a_full_queue_of_connections_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "control.sock"))
        server.listen(0)
        waiting = []
        while True:  # as many as the kernel queues before it says no
            peer = socket.socket(socket.AF_UNIX)
            waiting.append(peer)
            peer.setblocking(False)
            try:
                peer.connect(str(tmp_path / "control.sock"))
            except BlockingIOError:
                break
        failure = failed(tmp_path, timeout_s=0.3)
        for peer in waiting:
            peer.close()

    assert "did not answer within" in failure.message


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"{\n",
        b"null\n",
        b"[]\n",
        b"{}\n",
        b'{"ok": 1}\n',
        b'{"ok": false}\n',
        b'{"ok": false, "error": "no"}\n',
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_answer_of_a_pool_is_told_as_unreachable(answer: bytes) -> None:
    with FakePool(lambda _: answer) as pool:
        failure = failed(pool.folder)

    assert (failure.code, failure.exit_code) == ("bad_answer", Exit.UNREACHABLE)
    assert str(pool.folder) in failure.message


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupool.cli.control._MAX_ANSWER_BYTES", 100_000)
    with FakePool(lambda _: b"x" * 300_000) as pool:
        assert "more than 100000 bytes" in failed(pool.folder).message


def test_numbers_that_json_lacks_become_null() -> None:
    with FakePool(lambda _: b'{"ok": true, "result": [NaN, Infinity, 1]}\n') as pool:
        assert ask(RuntimeDir(pool.folder), "status") == [None, None, 1]


@pytest.mark.parametrize(
    "result",
    [
        None,
        3,
        {},
        {"pool": {}},
        {"pool": {"ready": 1, "degraded": False}, "workers": []},
        {"pool": {"ready": True, "degraded": False}},
    ],
)
def test_a_status_without_the_parts_that_decide_is_refused(result: Any) -> None:
    with FakePool(steady(result)) as pool, pytest.raises(Failure) as caught:
        status_of(RuntimeDir(pool.folder))

    assert caught.value.exit_code == Exit.UNREACHABLE


def test_a_status_document_is_returned_as_it_is() -> None:
    expected = document() | {"later": {"key": 1}}

    def reply(request: dict[str, Any]) -> Answer:
        assert request == {"verb": "status"}
        return ok(expected)

    with FakePool(reply) as pool:
        assert status_of(RuntimeDir(pool.folder)) == json.loads(json.dumps(expected))
