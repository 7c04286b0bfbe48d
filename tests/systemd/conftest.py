"""One box for all tests of the units, and in it a pool that each test finds as it is after the installation."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.systemd_box import SOURCES, Box, why_not
from support.systemd_service import CONFIG, INSIDE, UNIT, Service


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    """A box with the units and users installed by the very files of this tree; about 20 s, once."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="gpupool-box-") as folder:
        made = Box(Path(folder))
        try:
            made.run(
                "cp",
                *(f"{SOURCES}/systemd/{unit}" for unit in (UNIT, "gpupool@.service", "gpupool-xid.service")),
                "/etc/systemd/system",
            )
            for kind in ("sysusers", "tmpfiles"):
                made.run("cp", f"{SOURCES}/systemd/gpupool.{kind}", f"/usr/lib/{kind}.d/gpupool.conf")
            made.run("systemd-sysusers")
            made.run("systemd-tmpfiles", "--create", "gpupool.conf")
            made.write("/etc/gpupool/inside.py", INSIDE)
            made.run("cp", f"{SOURCES}/tests/support/toy_models.py", "/etc/gpupool")
            # A device that no unit of ours allows. It has no driver: without a rule, opening it would fail in another way.
            made.run("mknod", "-m", "666", "/dev/other", "c", "29", "0")
            yield made
        finally:
            made.close()


@pytest.fixture
def service(box: Box) -> Iterator[Service]:
    """The installed pool, configured and not yet started; stopped at the end."""
    made = Service(box)
    made.configure(CONFIG)
    made.run("sh", "-c", "rm -rf /etc/systemd/system/*.service.d")
    made.run("systemctl", "daemon-reload")
    made.run("systemctl", "reset-failed")
    yield made
    made.run("systemctl", "stop", "gpupool*")
