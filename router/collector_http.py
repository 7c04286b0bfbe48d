"""HTTP to a collector that need not be well: one deadline for all of an export, a bound on the answer, no redirects.

A timeout of requests holds for each operation on the socket, so an answer of a byte a second lasts for ever. Here each operation gets
what is left of the export. Proxies and certificates are requests' own affair, as before.
"""

from __future__ import annotations

import http.client
import io
import time
from typing import TYPE_CHECKING, Any, Final

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

if TYPE_CHECKING:
    import socket

#: One answer with its head; a collector's is some hundred bytes.
MAX_ANSWER_BYTES: Final = 16 << 10


class Deadline:
    """When the export under way has to be over, on the monotonic clock."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self, timeout_s: float) -> None:
        """Start the time of the next export."""
        self._until = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds left.

        Raises:
            TimeoutError: none are.
        """
        if (left := self._until - time.monotonic()) <= 0:
            raise TimeoutError("the export's time is over")
        return left


def open_session(deadline: Deadline) -> requests.Session:
    """Make a session, for one thread, all of whose requests end by the deadline."""
    session = _Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter(deadline))
    return session


class _Session(requests.Session):
    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        response = super().send(request, **{**options, "allow_redirects": False})
        # The exporter takes all below 400 for taken; where a redirect leads, a token in the headers must not go.
        if 300 <= response.status_code < 400:
            raise requests.RequestException(f"the collector answers {response.status_code}, and redirects are not followed")
        return response


class _Adapter(HTTPAdapter):
    def __init__(self, deadline: Deadline) -> None:
        self._pools = _pools(deadline)
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **options)
        if not proxy.lower().startswith("socks"):  # whose connections are the way itself
            manager.pool_classes_by_scheme = self._pools
        return manager


def _pools(deadline: Deadline) -> dict[str, Any]:
    class Plain(_Limited, HTTPConnection):
        limit = deadline

    class Tls(_Limited, HTTPSConnection):
        limit = deadline

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class TlsPool(HTTPSConnectionPool):
        ConnectionCls = Tls

    return {"http": PlainPool, "https": TlsPool}


class _Limited(HTTPConnection):
    """A connection whose every operation has what is left. The handshake of TLS and a sendall are one operation each."""

    limit: Deadline

    def connect(self) -> None:
        self.timeout = self.limit.left_s()
        super().connect()

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        self.sock.settimeout(self.limit.left_s())
        super().send(data)

    def response_class(self, sock: socket.socket, **options: Any) -> http.client.HTTPResponse:  # type: ignore[override]
        return _Answer(sock, self.limit, **options)


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, limit: Deadline, **options: Any) -> None:
        super().__init__(sock, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Incoming(sock, limit))

    def begin(self) -> None:
        super().begin()
        del self.headers["Content-Encoding"]  # 16 KiB can unfold to many MiB, and nobody reads them


class _Incoming(io.RawIOBase):
    """The bytes of one answer, so many of them, and by the deadline."""

    def __init__(self, sock: socket.socket, limit: Deadline) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open, as http.client expects it
        self._limit = limit
        self._room = MAX_ANSWER_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._sock.settimeout(self._limit.left_s())
        count = self._file.readinto(buffer) or 0
        self._room -= count
        if self._room < 0:
            raise OSError(f"the collector's answer is longer than {MAX_ANSWER_BYTES} bytes")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
