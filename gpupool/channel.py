"""The private line between the supervisor and one child: small msgpack maps over an inherited SOCK_SEQPACKET pair.

Message boundaries are the kernel's, so nothing needs framing; the other end's death reads as end of file. Both ends are
non-blocking: a child that does not read can cost the supervisor a refused send, never a wait.

Every message is a map with a key `t`. The first to a child is its `spec`. What follows:

| to the router | means |
| --- | --- |
| lost {slot, incarnation, running, blame, reason, kind} | that worker is dead; `running`: its batch's tickets, None: unknown |
| hold {slot} / release {slot} | send no new work to the slot / do again |
| avoid {slot, on} | its worker is late: give it nothing new |
| expect {ready, coming, admission} | workers ready, those that may yet become so, share of the backlog's bounds in force |
| settings {…} | live values of a reload |
| drain {} | refuse new requests with `draining`, finish the rest, answer `drained` |
| undrain {} | take requests again |
| stop {} | answer whatever is left, flush and exit 0 |
| stats {n} | answer `stats` with the same n |
| clear_poison {n, prefix} | let contents pass again whose hash begins so; answer {n, cleared} |

| from the router | means |
| --- | --- |
| up {bind} | sockets are bound |
| joined {slot, incarnation} | that worker registered and gets work |
| idle {slot} | a held slot has finished all that it was given |
| drained {} | nothing pending, nothing in flight |
| sick {slot, incarnation, reason} | too many infrastructure errors in a row: replace it |
| event {level, event, fields} | a rare event of the router's that belongs into the pool's journal |
| stats {n, latencies, log, …} | the books, see router.accounts; histograms by model and stage, see router.latencies; see Log.report |
| answer {n, …} | to a question with this n |

| from a worker | means |
| --- | --- |
| loaded {models, device, memory} | import, load and warm-up are done |
| failed {stage, message, traceback} | it cannot start; exit follows |
| answer {n, …} | to a question with this n |
| recycle {reason} | it should be replaced when that disturbs nobody: memory is lost that a new process would have |
| report {memory, …} | what it tells of itself once a second, for people and metrics (see worker.report) |

| to a worker | means |
| --- | --- |
| settings {batching, memory} | batching settings of each model and those of memory, after a reload; they hold from the next batch |
| snapshot {n, path, seconds} | write a memory snapshot to that path; answer {n, files, …} or {n, error} |
| profile {n, path, batches, seconds} | profile the next batches, at most so long, and write it beside that path; answer {n, batches, file, …} or {n, error} |
| drill {kind} | kind `hang`: let the work loop block for ever in its next batch, at once when nothing waits (see supervisor.drill) |
| stop {} | finish the running batch, give the rest back, exit 0 (SIGTERM means the same) |
"""

from __future__ import annotations

import socket
from typing import Any, Final

import msgpack

ENV_FD: Final = "GPUPOOL_CHANNEL_FD"
#: Linux caps a packet at the send buffer, 208 KiB unless root raised it; configuration refuses options that would not fit.
MAX_MESSAGE_BYTES: Final = 160 * 1024

Message = dict[str, Any]


class Channel:
    """One end of the line."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Make the supervisor's end and the socket to pass to a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take up the inherited end in a child; not inherited further."""
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        return cls(sock)

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self._sock.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; False when the other end is gone or does not read (nothing is sent then).

        Raises:
            ValueError: when the message is larger than MAX_MESSAGE_BYTES.
        """
        # A text that is no valid UTF-8 comes from a model or from the host, and must not end who passes it on.
        data: bytes = msgpack.packb(message, unicode_errors="replace")
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{message.get('t')}: {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
        try:
            self._sock.send(data)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Return the next message, None when none waits now.

        Raises:
            EOFError: when the other end is gone.
        """
        try:
            data = self._sock.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except OSError as e:
            raise EOFError(str(e)) from None
        if not data:
            raise EOFError
        message: Message = msgpack.unpackb(data, raw=False, strict_map_key=False)
        return message

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
