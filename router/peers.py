"""Which routing id belongs to which connection of the clients' socket, and whether its messages are taken. Pure.

libzmq tells three things, through three sockets: that a connection was accepted or ended (by its descriptor, through the monitor), that
one asks to be let in (ZAP, no descriptor, no routing id), and messages (routing id, descriptor, and the pass that it was let in with).
A descriptor is used again as soon as it is free, and what a connection sent is read even after its end. So each pass has a serial
number, and each acceptance notes the last one given out before it: a message whose serial is not above that of its descriptor's
present connection was left behind by an earlier one. This is exact if `accepted` and `ended` are told before `admit` and `arrived`
whenever they happened before, which the shell sees to by emptying the monitor first.

A routing id has one connection at a time: libzmq gives it to nobody else before the last message of that connection has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Longer than a handshake may take: who has said nothing for so long is connected and silent.
SILENT_S: Final = 15.0


@dataclass(slots=True)
class _Connection:
    """A connection that is open. `client` and what follows are known from its first message on."""

    serial_before: int
    accepted_at: float
    client: bytes | None = None
    key: str = ""
    name: str = ""
    looked_at: int = 0  # bytes it had sent when its messages were last looked for
    looks: int = 0  # in a row that found too much since then


class Peers:
    """The open connections. What follows for the router's core is put into `gone` and `named`, for the shell to take, in this order."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = names  # of the keys that are authorised; None: no client has a key
        self._open: dict[int, _Connection] = {}
        self._by_client: dict[bytes, _Connection] = {}
        self._serial = 0
        #: Routing ids whose messages are taken without another look.
        self.known: set[bytes] = set()
        self.gone: list[bytes] = []
        self.named: list[tuple[bytes, str]] = []
        self.refused = 0
        self.dropped = 0

    def accepted(self, fd: int, now: float) -> None:
        """A connection was accepted; its handshake is still to come."""
        if fd in self._open:  # its end was not told
            self.ended(fd)
        self._open[fd] = _Connection(self._serial, now)

    def ended(self, fd: int) -> None:
        """A connection has ended."""
        connection = self._open.pop(fd, None)
        if connection is not None and connection.client is not None:
            del self._by_client[connection.client]
            self.known.discard(connection.client)
            self.gone.append(connection.client)

    def admit(self, key: str = "") -> str | None:
        """Return the pass of a client that may come in with this key, None for one that may not."""
        if self._names is not None and key not in self._names:
            return None
        self._serial += 1
        return f"{self._serial} {key}"

    def arrived(self, client: bytes, fd: int, given: str) -> bool:
        """Whether to take the message of a client that is not `known`, which came over this connection with this pass."""
        connection = self._open.get(fd)
        serial, _, key = given.partition(" ")
        if connection is None or not serial.isdigit() or int(serial) <= connection.serial_before:
            self.dropped += 1  # left behind by a connection that has ended
            return False
        if connection.client is None:
            connection.client, connection.key = client, key
            self._by_client[client] = connection
        name = "" if self._names is None else self._names.get(connection.key)
        if connection.client != client or name is None:
            self.dropped += 1
            return False
        if name != connection.name:
            connection.name = name
            self.named.append((client, name))
        self.known.add(client)
        return True

    def rekeyed(self, names: Mapping[str, str]) -> None:
        """Other keys are authorised from now on: what clients without one have sent is not run, and nothing more is taken from them."""
        self._names = names
        self.known.clear()  # looked at again, each at its next message
        for client, connection in self._by_client.items():
            if connection.key not in names:
                connection.name = ""  # told anew should its key come back
                self.gone.append(client)

    def has(self, client: bytes) -> bool:
        """Whether a client's connection is open."""
        return client in self._by_client

    def key_of(self, client: bytes) -> str:
        """The key that a client has come in with; empty where there is none."""
        connection = self._by_client.get(client)
        return connection.key if connection is not None else ""

    def keys(self) -> Iterator[str]:
        """The key of each connection that has sent a message."""
        return (connection.key for connection in self._by_client.values())

    def silent(self, now: float) -> int:
        """How many connections have never sent a message, though they had the time."""
        return sum(c.client is None and now >= c.accepted_at + SILENT_S for c in self._open.values())

    def has_chosen_ids(self) -> bool:
        """Whether a client has chosen its routing id itself: those of libzmq begin with a zero byte."""
        return any(client[0] for client in self._by_client)

    def hoarding(self, received: Callable[[int], int | None], limit: int) -> list[tuple[int, int, int]]:
        """Return each connection that has sent more than `limit` since a message of it was taken: descriptor, bytes, looks in a row.

        To know of that costs nothing as long as nobody asks: who has sent so much is `known` no more, which its next message mends.
        """
        found = []
        for fd, connection in self._open.items():
            size = received(fd)
            if size is None or size - connection.looked_at <= limit:
                continue
            if connection.client in self.known:
                self.known.discard(connection.client)
                connection.looked_at, connection.looks = size, 0
            else:
                connection.looks += 1
                found.append((fd, size - connection.looked_at, connection.looks))
        return found

    def stats(self, now: float) -> dict[str, Any]:
        """Counts for the books."""
        return {
            "connections": len(self._open), "silent_connections": self.silent(now), "handshakes_refused_total": self.refused,
            "messages_dropped_total": self.dropped,
        }  # fmt: skip
