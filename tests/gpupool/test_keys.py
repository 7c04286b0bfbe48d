"""Keys in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
import zmq.auth

from gpupool.keys import KeyFileError, certificate, is_key, read_public, read_secret


def test_what_zmq_makes_is_a_key_and_what_it_could_not_decode_is_none() -> None:
    for _ in range(50):
        assert all(is_key(key.decode()) for key in zmq.curve_keypair())
    assert is_key("0" * 40)
    for text in ("", "0" * 39, "0" * 41, "~" + "0" * 39, " " + "0" * 39, "%" * 40, "ä" * 40):
        assert not is_key(text)


def test_certificates_are_those_of_zmq_auth(tmp_path: Path) -> None:
    theirs = zmq.auth.create_certificates(tmp_path, "a")
    Path(theirs[1]).chmod(0o600)
    public, secret = zmq.auth.load_certificate(theirs[1])
    assert secret is not None
    assert (read_public(theirs[0]), read_secret(theirs[1])) == (public.decode(), secret.decode())

    ours = tmp_path / "ours"
    ours.write_text(certificate(public.decode(), secret.decode()))
    assert zmq.auth.load_certificate(ours) == (public, secret)
    ours.write_text(certificate(public.decode()))
    assert zmq.auth.load_certificate(ours) == (public, None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o666])
def test_secret_that_others_may_use_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("0" * 40)
    file.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}"):
        read_secret(file)


@pytest.mark.parametrize("text", ["", "\n", "x", 'secret-key = "short"', 'secret-key = ""', "a\nb\nc", "public-key = x"])
def test_errors_name_the_file_and_never_its_content(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.key_secret"
    file.write_text(text + ("MARKER" if text else ""))
    file.chmod(0o600)
    with pytest.raises(KeyFileError, match=r"a\.key_secret") as caught:
        read_secret(file)
    assert "MARKER" not in str(caught.value)
