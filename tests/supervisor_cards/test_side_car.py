"""The kernel-log side-car hands on what concerns cards."""

from __future__ import annotations

import socket
from pathlib import Path

from gpupool.supervisor.cards.side_car import forward


def test_only_the_drivers_lines_are_handed_on_and_an_absent_pool_is_no_error(tmp_path: Path) -> None:
    path = str(tmp_path / "xid.sock")
    line = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    forward([line], path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pool:
        pool.bind(path)
        pool.settimeout(5)
        forward(["usb 1-1: new device", line, "x" * 10_000 + " NVRM"], path)
        assert pool.recv(9000).decode() == line
        assert len(pool.recv(9000)) <= 4000
