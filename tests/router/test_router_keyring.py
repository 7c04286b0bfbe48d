"""Key files that come and go."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.auth

from gpupool.router import keyring as module
from gpupool.router.keyring import Keyring, Keys, watch


def public() -> str:
    return zmq.curve_keypair()[0].decode()


def test_both_formats_are_read_and_files_that_come_and_go_are_noticed(tmp_path: Path) -> None:
    keyring, bob = Keyring(tmp_path), public()
    assert keyring.look() == Keys()

    zmq.auth.create_certificates(tmp_path, "alice")
    alice = zmq.auth.load_certificate(tmp_path / "alice.key")[0].decode()
    (tmp_path / "bob.key").write_text(bob + "\n")
    assert keyring.look() == Keys({alice: "alice", bob: "bob"})

    (tmp_path / "alice.key").unlink()
    (tmp_path / "bob.key").rename(tmp_path / "robert.key")
    assert keyring.look() == Keys({bob: "robert"})


def test_key_replaced_in_place_is_noticed(tmp_path: Path) -> None:
    """Which changes nothing in the folder itself."""
    old, new = public(), public()
    file = tmp_path / "bob.key"
    file.write_text(old)
    os.utime(file, (1, 1))
    keyring = Keyring(tmp_path)
    assert keyring.look().names == {old: "bob"}

    file.write_text(new)
    assert keyring.look().names == {new: "bob"}


def test_bad_files_are_named_and_authorise_nobody(tmp_path: Path) -> None:
    good = public()
    zmq.auth.create_certificates(tmp_path, "leaked")
    (tmp_path / "leaked.key").unlink()
    (tmp_path / "leaked.key_secret").rename(tmp_path / "leaked.key")
    (tmp_path / "a.key").write_text(good)
    (tmp_path / "b.key").write_text(good)
    (tmp_path / "empty.key").write_text("")
    (tmp_path / "short.key").write_text(good[:39])
    (tmp_path / "large.key").write_bytes(b"x" * 100_000)
    (tmp_path / "noise.key").write_bytes(os.urandom(100))
    (tmp_path / "over.key").write_text("%" * 40)
    (tmp_path / "spa ce.key").write_text(good)
    (tmp_path / "folder.key").mkdir()
    os.mkfifo(tmp_path / "fifo.key")
    (tmp_path / ".hidden.key").write_text("nothing")
    (tmp_path / "readme.txt").write_text("nothing")

    keys = Keyring(tmp_path).look()
    assert keys.names == {good: "a"}
    expected = {"leaked", "b", "empty", "short", "large", "noise", "over", "spa ce", "folder", "fifo"}
    assert {file.removesuffix(".key") for file in keys.problems} == expected
    assert not any(good[:20] in problem for problem in keys.problems.values())


def test_folder_that_is_gone_authorises_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "a.key").write_text(public())
    keyring = Keyring(folder)
    assert keyring.look().names

    (folder / "a.key").unlink()
    folder.rmdir()
    keys = keyring.look()
    assert not keys.names
    assert str(folder) in keys.problems[""]


@pytest.mark.parametrize("where", ["scandir", "read_public"])
def test_want_of_descriptors_changes_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = public()
    (tmp_path / "a.key").write_text(key)
    keyring = Keyring(tmp_path)
    keyring.look()
    (tmp_path / "b.key").write_text(public())

    def fail(_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os if where == "scandir" else module, where, fail)
        assert keyring.look().names == {key: "a"}
        assert "Too many open files" in keyring.look().problems[""]
    assert len(keyring.look().names) == 2


def test_number_of_keys_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 3)
    for name in "abcde":
        (tmp_path / f"{name}.key").write_text(public())

    keys = Keyring(tmp_path).look()
    assert sorted(keys.names.values()) == ["a", "b", "c"]
    assert "more than 3 keys" in keys.problems[""]


def test_watch_tells_of_changes_and_of_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    told: list[Keys] = []
    heard = threading.Event()

    def tell(keys: Keys) -> None:
        told.append(keys)
        heard.set()

    keyring = Keyring(tmp_path)
    end: Callable[[], None] = watch(keyring, keyring.look(), tell)
    assert not heard.wait(0.2)
    file = tmp_path / "x"
    file.write_text(public())
    file.rename(tmp_path / "a.key")
    assert heard.wait(10)
    assert list(told[0].names.values()) == ["a"]
    end()


def test_a_link_to_itself_is_a_bad_file_and_no_more(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    (tmp_path / "alice.key").write_text(public())
    (tmp_path / "loop.key").symlink_to("loop.key")
    first = ring.look()
    (tmp_path / "alice.key").unlink()

    assert list(first.names.values()) == ["alice"]
    assert list(first.problems) == ["loop.key"]
    assert ring.look().names == {}
