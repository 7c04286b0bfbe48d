"""Many clients in one socket: a ROUTER that connects again and again, so that a thousand connections cost one receive each reply."""

from __future__ import annotations

from collections.abc import Sequence

import zmq


class ManyClients:
    """So many connections to one endpoint, each a client of its own to whoever is there."""

    def __init__(self, endpoint: str, connections: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 64)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.router_mandatory = True
        self.names = [b"c%d" % number for number in range(connections)]
        for name in self.names:
            self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, name)  # what we call it; the other end makes its own name
            self.socket.connect(endpoint)

    def send(self, connection: int, frames: Sequence[bytes]) -> None:
        """Send on one of the connections; waits in memory, without a bound, until it is up."""
        self.socket.send_multipart([self.names[connection], *frames])

    def receive(self, wait_ms: int) -> tuple[int, list[bytes]] | None:
        """The next message with the connection that it came on; None when none comes in time."""
        if not self.socket.poll(wait_ms):
            return None
        name, *frames = self.socket.recv_multipart()
        return int(name[1:]), frames

    def close(self) -> None:
        """Leave at once."""
        self.socket.close(0)
        self._context.term()
