"""`gpupool keygen`: what it writes, and what it never overwrites."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth

from gpupool.cli import main
from gpupool.exits import Exit
from gpupool.keys import read_public, read_secret


def test_a_pair_is_written_which_zmq_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", "alice", "--dir", str(tmp_path / "keys"), "--json"]) == Exit.OK

    told = json.loads(capsys.readouterr().out)
    public, secret = Path(told["public_key_file"]), Path(told["secret_key_file"])
    assert (public.name, secret.name, told["name"]) == ("alice.key", "alice.key_secret", "alice")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert read_public(public) == told["public_key"]
    assert zmq.curve_public(read_secret(secret).encode()).decode() == told["public_key"]
    assert zmq.auth.load_certificate(secret)[1] == read_secret(secret).encode()
    assert read_secret(secret) not in json.dumps(told) + public.read_text()


@pytest.mark.parametrize("there", ["pool.key", "pool.key_secret"])
def test_files_that_are_there_stay_unless_force_is_used(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / there).write_text("old")
    (tmp_path / there).chmod(0o644)

    assert main(["keygen", "--dir", str(tmp_path)]) == Exit.FAILED
    assert there in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "old"

    assert main(["keygen", "--dir", str(tmp_path), "--force"]) == Exit.OK
    assert read_secret(tmp_path / "pool.key_secret") not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "../x", ".x", "a b", "x" * 65])
def test_a_name_must_be_one_for_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", name, "--dir", str(tmp_path)]) == Exit.USAGE
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
