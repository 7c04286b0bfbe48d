"""The unit files as systemd reads them, without starting anything."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"
SERVICES = ("gpupool.service", "gpupool@.service", "gpupool-xid.service")
#: Of 10, where 10 is a service without any fence.
MOST_EXPOSED = 2.0

pytestmark = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed (Debian: systemd)"
)


def directives(name: str) -> list[str]:
    """The lines that mean something."""
    return [line for line in (UNITS / name).read_text().splitlines() if line and not line.startswith("#")]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The files, with programs at hand in place of those at /opt: they must exist for a check."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("gpupool", "python"):
        (programs / name).symlink_to("/bin/true")
    for name in SERVICES:
        (tmp_path / name).write_text((UNITS / name).read_text().replace("/opt/gpupool/.venv/bin/", f"{programs}/"))
    for unit in ("gpupool.service", "gpupool@.service"):
        (tmp_path / f"{unit}.d").mkdir()
        shutil.copy(UNITS / "lan-clients.conf", tmp_path / f"{unit}.d")
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("name", SERVICES)
def test_systemd_finds_nothing_to_complain_about(installed: Path, name: str) -> None:
    done = analyze("verify", "--man=no", str(installed / name))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_does_see_a_wrong_key_also_in_a_drop_in(installed: Path) -> None:
    conf = installed / "gpupool.service.d" / "lan-clients.conf"
    conf.write_text(conf.read_text().replace("IPAddressAllow=", "IPAdressAllow="))
    assert "IPAdressAllow" in analyze("verify", "--man=no", str(installed / "gpupool.service")).stderr


@pytest.mark.parametrize("name", SERVICES)
def test_the_sandbox_stays_closed(installed: Path, name: str) -> None:
    path = str(installed / name)
    done = analyze("security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED * 10:.0f}", path)
    assert done.returncode == 0, done.stdout[-300:]
    rows = json.loads(analyze("security", "--offline=true", "--no-pager", "--json=short", path).stdout)
    assert sum(float(row["exposure"] or 0) for row in rows) > 0  # it did read a unit


def test_the_template_differs_from_the_single_unit_by_the_pool_s_name_only() -> None:
    assert [
        line.replace("gpupool-%i", "gpupool").replace("/%i.toml", "/pool.toml") for line in directives("gpupool@.service")
    ] == [line.replace("on this host's GPUs", "%i") for line in directives("gpupool.service")]


def test_both_users_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    done = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", "--dry-run", "--inline", *directives("gpupool.sysusers")],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(f"user '{name}'" in done.stderr for name in ("gpupool", "gpupool-xid"))
