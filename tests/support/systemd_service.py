"""The installed pool in a box, as a test of the units handles it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from .running import until
from .systemd_box import Box

UNIT = "gpupool.service"
GPUPOOL = "/opt/gpupool/.venv/bin/gpupool"
CONFIG = """
[pool]
devices = "cpu:2"
[batching]
max_batch = 8
[[model]]
name = "toy"
handler = "toy_models:Sleep"
[[model]]
name = "inside"
handler = "inside:Inside"
"""
#: What a worker may do in the unit's sandbox, tried from within.
INSIDE = """
import errno, os, socket
from pathlib import Path

def attempt(action):
    try:
        return action() or "done"
    except OSError as e:
        return errno.errorcode[e.errno]

class Inside:
    def load(self, context):
        pass

    def forward(self, batch):
        return [{
            "uid": os.getuid(),
            "status": dict(line.split(":\\t", 1) for line in Path("/proc/self/status").read_text().splitlines()),
            "environment": sorted(os.environ),
            "configuration": attempt(lambda: os.close(os.open("/etc/gpupool/pool.toml", os.O_WRONLY))),
            "code": attempt(lambda: os.close(os.open("/opt/gpupool/.venv/x", os.O_WRONLY | os.O_CREAT))),
            "home": attempt(lambda: os.listdir("/root") and None),
            "cache": attempt(lambda: os.close(os.open(os.environ["XDG_CACHE_HOME"] + "/x", os.O_WRONLY | os.O_CREAT))),
            "tmp": attempt(lambda: os.close(os.open("/tmp/x", os.O_WRONLY | os.O_CREAT))),
            "other_device": attempt(lambda: os.close(os.open("/dev/other", os.O_RDWR))),
            "null_device": attempt(lambda: os.close(os.open("/dev/null", os.O_RDWR))),
            "packets": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()),
        }] * len(batch)
"""


class Service:
    """The installed pool."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.run = box.run

    def configure(self, text: str, name: str = "pool") -> None:
        """Write its configuration."""
        self.box.write(f"/etc/gpupool/{name}.toml", text)

    def drop_in(self, text: str, unit: str = UNIT) -> None:
        """Add a drop-in."""
        self.box.write(f"/etc/systemd/system/{unit}.d/test.conf", text)
        self.run("systemctl", "daemon-reload")

    def systemctl(self, verb: str, unit: str = UNIT, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """One of its verbs on the unit."""
        done = self.run("systemctl", verb, unit, check=False)
        assert not check or done.returncode == 0, f"{verb} {unit}: {done.stderr}\n{self.text()[-3000:]}"
        return done

    def show(self, name: str, unit: str = UNIT) -> str:
        """A property of the unit."""
        return self.box.show(unit, name)

    def wait(self, name: str, value: str, within: float = 20.0) -> None:
        """Wait until a property has a value."""
        for _ in until(within, 0.1):
            if self.show(name) == value:
                return
        raise AssertionError(f"{name} is {self.show(name)}, not {value}, after {within} s: {self.text()[-2000:]}")

    def status(self) -> dict[str, Any]:
        """The pool's own status document."""
        done = self.run("env", "GPUPOOL_RUNTIME_DIR=/run/gpupool", GPUPOOL, "status", "--json", check=False)
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def journal(self) -> list[dict[str, Any]]:
        """What the present run of the unit wrote, as the journal has it."""
        invocation = self.show("InvocationID")
        done = self.run("journalctl", "-o", "json", "--no-pager", f"_SYSTEMD_INVOCATION_ID={invocation}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def text(self) -> str:
        """All that the journal has about the unit."""
        return self.run("journalctl", "-o", "cat", "--no-pager", "-u", UNIT).stdout
