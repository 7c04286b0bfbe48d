"""Keys, clients with keys, and a tap on the wire, for tests of the router's front door."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from pathlib import Path

import zmq

from gpupool.keys import certificate
from gpupool.spec import CurveSpec

Keypair = tuple[bytes, bytes]


class Keys:
    """A pool's key pair, and the folder of its clients' public keys."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.public, self.secret = zmq.curve_keypair()
        self.secret_file = folder / "pool.key_secret"
        self.secret_file.touch(0o600)
        self.secret_file.write_text(certificate(self.public.decode(), self.secret.decode()))
        self.folder = folder / "clients"
        self.folder.mkdir(exist_ok=True)

    @property
    def spec(self) -> CurveSpec:
        return CurveSpec(str(self.secret_file), str(self.folder))

    def add(self, name: str, pair: Keypair | None = None) -> Keypair:
        """Authorise a key, a new one unless given."""
        pair = pair or zmq.curve_keypair()
        new = self.folder / f".{name}.new"
        new.write_text(certificate(pair[0].decode()))
        new.rename(self.folder / f"{name}.key")
        return pair

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.key").unlink()

    def use(self, sock: zmq.Socket[bytes], pair: Keypair, server: bytes | None = None) -> zmq.Socket[bytes]:
        """Give a socket that is not connected yet a key."""
        sock.curve_publickey, sock.curve_secretkey = pair
        sock.curve_serverkey = server or self.public
        return sock


class Tap:
    """A TCP relay that keeps what went through it, both ways."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._ends, self._tell_end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        while True:
            ready, _, _ = select.select([self._listener, self._ends, *other], [], [])
            if self._ends in ready:
                for sock in other:
                    sock.close()
                return
            for sock in ready:
                if sock is self._listener:
                    client, _ = self._listener.accept()
                    server = socket.create_connection(self._to, timeout=5)
                    other[client], other[server] = server, client
                elif sock in other:
                    data = b""
                    with contextlib.suppress(OSError):
                        data = sock.recv(65536)
                    if data:
                        self.seen += data
                        other[sock].sendall(data)
                    else:
                        for end in (other.pop(sock), sock):
                            other.pop(end, None)
                            end.close()

    def close(self) -> None:
        self._tell_end.close()
        self._thread.join(5)
        self._ends.close()
        self._listener.close()
