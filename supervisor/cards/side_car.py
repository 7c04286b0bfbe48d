"""`python -m gpupool.supervisor.cards.side_car`: hands the driver's lines of the kernel log to the pool, which itself may not read it.

Follows the kernel journal through journalctl and sends each NVRM line as one datagram to the pool's xid.sock. It runs as a user of its own
that can read the journal and reach that socket, and nothing else; see systemd/gpupool-xid.service.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterable

from gpupool.paths import find_runtime_dir

_MAX_LINE = 4000


def forward(lines: Iterable[str], path: str) -> None:
    """Send the lines that concern cards; a pool that is not there just now misses them, and its cards' recovery action will still tell."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        for line in lines:
            if "NVRM" in line:
                try:
                    sock.sendto(line.strip()[:_MAX_LINE].encode(), path)
                except OSError as e:
                    print(f"not delivered ({e.strerror}): {line.strip()[:200]}", file=sys.stderr, flush=True)


def main() -> int:
    """Follow until journalctl ends; systemd starts us again."""
    command = ["journalctl", "--dmesg", "--follow", "--lines=0", "--output=cat", "--no-pager", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as journal:
        assert journal.stdout is not None
        forward(journal.stdout, str(find_runtime_dir(None).xid))
    return 1


if __name__ == "__main__":
    sys.exit(main())
