"""systemd's notification protocol: one datagram per message to $NOTIFY_SOCKET, and nothing at all where there is none."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


class Notifier:
    """Sends state to the service manager. Never raises, never blocks."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None
        self._last: dict[str, str] = {}

    def send(self, **values: str | int) -> None:
        """Send `KEY=value` lines in one datagram."""
        if self._socket is None:
            return
        text = "\n".join(f"{key}={value}" for key, value in values.items())
        with suppress(OSError):
            self._socket.sendto(text.encode(), self._address)

    def status(self, text: str) -> None:
        """Send STATUS when it has changed."""
        if self._last.get("STATUS") != text:
            self._last["STATUS"] = text
            self.send(STATUS=text)
