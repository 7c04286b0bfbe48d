"""A small and strict receiver of Fluentd's forward protocol, which can misbehave on demand."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import msgpack


class ForwardReceiver:
    """Listens on loopback, checks the form of all that comes, keeps the records.

    `mode` may change at any time: "ack" takes all; "withhold" reads and never answers; "stranger" answers with another id;
    "hole" accepts and never reads; "slow" reads 64 kB a second.
    Bytes for a mode are the answer, one of them every 50 ms, again and again.
    """

    def __init__(self, port: int = 0, mode: str | bytes = "ack") -> None:
        self.mode: str | bytes = mode
        self.records: list[dict[str, Any]] = []
        self.chunks: list[str] = []  # ids as they came, repeats too
        self.problems: list[str] = []
        self.connections = 0
        self._closed = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Die: all connections are cut."""
        self._closed.set()
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def wait(self, condition: Callable[[], bool], within: float = 20.0) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + within
        while not condition():
            assert time.monotonic() < end, f"not within {within} s: {len(self.records)} records, {self.problems}"
            time.sleep(0.01)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        unpacker = msgpack.Unpacker(strict_map_key=True)
        with contextlib.suppress(OSError):
            while not self._closed.is_set():
                if self.mode == "hole":
                    self._closed.wait(0.02)
                    continue
                data = connection.recv(6400 if self.mode == "slow" else 65536)
                if not data:
                    return
                if self.mode == "slow":
                    self._closed.wait(0.1)
                try:
                    unpacker.feed(data)
                    for message in unpacker:
                        self._take(connection, message)
                except (ValueError, msgpack.UnpackException) as e:
                    self.problems.append(f"{type(e).__name__}: {e}")
                    return

    def _take(self, connection: socket.socket, message: Any) -> None:
        try:
            tag, packed, option = message
            assert tag.startswith("gpupool."), tag
            assert option.keys() == {"chunk", "size"}, option
            unpacker = msgpack.Unpacker(strict_map_key=True)
            unpacker.feed(packed)
            entries = list(unpacker)
            assert len(entries) == option["size"], (len(entries), option)
            for (kind, data), record in entries:
                seconds, nanoseconds = struct.unpack(">II", data)
                assert kind == 0, kind
                assert abs(seconds + nanoseconds / 1e9 - record["time"]) < 1e-3, record
        except Exception as e:
            self.problems.append(f"{type(e).__name__}: {e}")
            return
        if self.mode in ("ack", "slow") and option["chunk"] not in self.chunks:
            self.records += [record for _, record in entries]
        self.chunks.append(option["chunk"])
        while isinstance(self.mode, bytes) and not self._closed.wait(0.0):
            for n in range(len(self.mode)):
                connection.sendall(self.mode[n : n + 1])
                self._closed.wait(0.05)
        if self.mode != "withhold":
            name = "other" if self.mode == "stranger" else option["chunk"]
            connection.sendall(msgpack.packb({"ack": name}))
