"""The pool's listening sockets: opened once, held for the supervisor's whole life, lent to one router after the other.

While no router runs the kernel still completes connections and keeps them, so a client waits instead of being refused, and the next
router finds it there. How many may wait is the kernel's to bound: the smaller of _BACKLOG and net.core.somaxconn for each socket. Beyond
that TCP's first packets are dropped, which clients' kernels repeat, and connecting to a path fails with EAGAIN, which libzmq repeats.

What each socket is made with is what libzmq's own bind would do, which is not asked: it only takes over a socket that listens.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_BACKLOG: Final = socket.SOMAXCONN
#: Bits taken from the modes of sockets in the file system: clients' are for our group too, the workers' for ourselves only.
_CLIENTS_UMASK: Final = 0o117
_WORKERS_UMASK: Final = 0o177
#: Whether somebody listens on a path shows at once.
_PROBE_S: Final = 1.0
_SIOCGIFADDR: Final = 0x8915
_IFNAMSIZ: Final = 16


class BindError(Exception):
    """An address cannot be bound; the message names it."""


class Listener:
    """One listening socket. `address` is what came of the configured one: names, wildcards and port 0 are resolved.

    Raises:
        BindError: it cannot be bound.
    """

    def __init__(self, address: str, umask: int) -> None:
        self._path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        try:
            self._socket = _open_tcp(address) if self._path is None else _open_path(self._path, umask)
        except (OSError, UnicodeError) as e:  # a name that is none fails in its encoding
            raise BindError(f"cannot bind {address}: {getattr(e, 'strerror', None) or e}") from None
        # libzmq accepts from a thread that does much else; it must never wait for a connection that has gone again.
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self.address = address if self._path is not None else _name(self._socket)
        self._file = None if self._path is None else _identity(self._path)

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Refuse from now on who waits and who comes; take away the file, if it is still ours."""
        self._socket.close()
        if self._path is not None and self._file is not None and _identity(self._path) == self._file:
            with suppress(OSError):
                self._path.unlink()
        self._file = None


class Listeners:
    """The clients' sockets in the order of `router.bind`, and the workers'.

    Raises:
        BindError: for the first address that cannot be bound; nothing stays open then.
    """

    def __init__(self, bind: Sequence[str], workers: Path) -> None:
        self.clients: list[Listener] = []
        self._workers_address = f"ipc://{workers}"
        try:
            for address in bind:
                self.clients.append(Listener(address, _CLIENTS_UMASK))
            self.workers = Listener(self._workers_address, _WORKERS_UMASK)
        except BindError:
            for listener in self.clients:
                listener.close()
            raise

    def reopen_workers(self) -> None:
        """Make the workers' socket anew after its file was removed; only a router that starts after that has it.

        Raises:
            BindError: it cannot be bound.
        """
        before, self.workers = self.workers, Listener(self._workers_address, _WORKERS_UMASK)
        before.close()

    def close(self) -> None:
        """Close all. Closing twice does no harm."""
        for listener in (*self.clients, self.workers):
            listener.close()


def _open_tcp(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    number = 0 if port == "*" else int(port)
    if host == "*":
        where: tuple[object, ...] = ("0.0.0.0", number)  # noqa: S104 - the configuration asks for it
    else:
        bare = _interface_address(host) or host.strip("[]")
        where = socket.getaddrinfo(bare, number, family, socket.SOCK_STREAM)[0][4]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier pool that linger in TIME_WAIT are no reason to refuse.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(where)
    except BaseException:
        sock.close()
        raise
    return sock


def _interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface, whose name may stand for a host; None where there is none of that name."""
    if len(name) >= _IFNAMSIZ:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24])
    return None


def _name(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _open_path(path: Path, umask: int) -> socket.socket:
    _free(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _umask(umask):
            sock.bind(str(path))
    except BaseException:
        sock.close()
        raise
    return sock


def _free(path: Path) -> None:
    """Take away what a pool that is gone has left, and nothing else.

    Raises:
        OSError: something that is no socket is there, or somebody listens.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # nothing is there, or bind says what is wrong
    if not stat.S_ISSOCK(mode):
        raise OSError("there is something at that path that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError("address already in use")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
