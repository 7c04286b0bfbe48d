"""Ask a running pool over its control socket: one JSON line there, one back, and an end within seconds whatever sits at the other end."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any, Final

from gpupool.exits import Exit
from gpupool.paths import RuntimeDir

from .output import Failure

#: Below the 5 s in which a command must end when it cannot reach the pool, the program's own start included.
TIMEOUT_S: Final = 4.0
#: A status document of 64 workers has some 40 kB.
_MAX_ANSWER_BYTES: Final = 16 << 20
#: How long to wait before the next try while the pool's queue of connections is full.
_RETRY_S: Final = 0.02


def ask(runtime: RuntimeDir, verb: str, *, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
    """Ask one question and return the pool's result.

    Raises:
        Failure: exit 3 when no pool can be reached or the answer is not one, 1 with the pool's own code when it refused.
    """
    expires = time.monotonic() + timeout_s
    # A supervisor that stands still until we have given up must not do it then: the clock is the host's, and so the same.
    line = json.dumps({"verb": verb, "expires": expires, **arguments}).encode() + b"\n"
    try:
        answer = _answer(_exchange(runtime, line, expires))
    except PermissionError:
        raise unreachable("permission_denied", f"no permission to use {runtime.control}") from None
    except TimeoutError:
        raise unreachable("unreachable", f"the pool at {runtime.control} did not answer within {timeout_s:g} s") from None
    except OSError as e:
        why = f"no pool can be reached at {runtime.control}: {e.strerror or e}"
        raise unreachable("unreachable", f"{why}; is `gpupool serve` running with this runtime directory?") from None
    except ValueError as e:
        raise unreachable("bad_answer", f"what answers at {runtime.control} is not a pool of this version: {e}") from None
    if answer["ok"]:
        return answer.get("result")
    error = answer["error"]
    details = {key: value for key, value in error.items() if key not in {"code", "message"}}
    raise Failure(error["code"], error["message"], Exit.FAILED, **details)


def status_of(runtime: RuntimeDir) -> dict[str, Any]:
    """Ask for the status document, and check the parts that commands decide by."""
    document = ask(runtime, "status")
    try:
        sound = isinstance(document["pool"]["ready"], bool) and isinstance(document["pool"]["degraded"], bool)
        sound = sound and all(isinstance(w["worker"], int) and isinstance(w["state"], str) for w in document["workers"])
    except (TypeError, KeyError):
        sound = False
    if not sound:
        raise unreachable("bad_answer", f"what answers at {runtime.control} sent no status document")
    return dict(document)


def unreachable(code: str, message: str) -> Failure:
    """Make the failure of a command that found no pool."""
    return Failure(code, message, Exit.UNREACHABLE)


def _exchange(runtime: RuntimeDir, line: bytes, deadline: float) -> bytes:
    if problem := runtime.problem():
        raise OSError(problem)
    with _connect(str(runtime.control), deadline) as sock:
        _limit(sock, deadline)
        # A pool that refuses at once may close before it has read all; its answer, if it gave one, still waits to be read.
        with suppress(BrokenPipeError):
            sock.sendall(line)
        data = bytearray()
        while b"\n" not in data:
            _limit(sock, deadline)
            chunk = sock.recv(65536)
            if not chunk:
                raise ValueError("it closed the connection")
            data += chunk
            if len(data) > _MAX_ANSWER_BYTES:
                raise ValueError(f"its answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(data).partition(b"\n")[0]


def _connect(path: str, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _limit(sock, deadline)
            sock.connect(path)
        except BlockingIOError:  # the backlog is full: with a time-out set, the kernel does not wait for us
            sock.close()
            time.sleep(_RETRY_S)
        except BaseException:
            sock.close()
            raise
        else:
            return sock


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _answer(line: bytes) -> dict[str, Any]:
    answer = json.loads(line, parse_constant=lambda _: None)
    if isinstance(answer, dict):
        error = answer.get("error")
        if answer.get("ok") is True:
            return answer
        if answer.get("ok") is False and isinstance(error, dict) and {"code", "message"} <= error.keys():
            return answer
    raise ValueError("its answer is neither a result nor an error")
