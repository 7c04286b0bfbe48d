"""A model whose speed is known and whose results prove whose they are; by order of its options or samples it is slow, broken or deadly.

A batch takes `fixed_s` plus `each_s` for each of its samples, or as long as the longest `sleep` that a sample asks for. On CPUs a
handler cannot see which worker it is (every context.device is "cpu"), so workers that are to differ draw numbers: the lowest free one
in the folder `roles`, held by a lock until the process ends, so that its successor gets it again. Options by number are lists.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

_MOST_ROLES = 256


class Paced:
    """Answers each sample with its number `n`, the checksum of its bytes `b`, those bytes if it says `back`, and the worker's role."""

    def load(self, context: Any) -> None:
        """Read the options: `fixed_s`, `each_s`, `roles` (a folder), `factors` (slowness by role), `broken` (roles that only fail)."""
        options = context.options
        self._fixed_s, self._each_s = options.get("fixed_s", 0.0), options.get("each_s", 0.0)
        self._role = self._draw(Path(options["roles"])) if "roles" in options else 0
        factors = options.get("factors", [])
        self._factor = factors[self._role] if self._role < len(factors) else 1.0
        self._broken = self._role in options.get("broken", [])
        if self._broken:
            _pretend_internal_errors()

    def _draw(self, folder: Path) -> int:
        for number in range(_MOST_ROLES):
            self._lock = os.open(folder / f"role{number}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
            else:
                return number
        raise RuntimeError(f"more than {_MOST_ROLES} workers")

    def forward(self, batch: list[Any]) -> list[Any]:
        """Take the time that is due, then answer."""
        if self._broken:
            from gpupool.errors import Internal

            raise Internal("this worker is broken")
        for sample in batch:
            match sample.get("do"):
                case "raise":
                    raise ValueError(f"sample {sample['n']} is bad")
                case "refuse":
                    from gpupool.errors import Overloaded

                    raise Overloaded("this model does not want to")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case _:
                    pass
        asked = max(sample.get("sleep", 0.0) for sample in batch)
        time.sleep(max(asked, self._fixed_s + self._each_s * len(batch)) * self._factor)
        return [self._answer(sample) for sample in batch]

    def _answer(self, sample: dict[str, Any]) -> dict[str, Any]:
        data = sample.get("b", b"")
        answer = {"n": sample.get("n"), "crc": zlib.crc32(data), "role": self._role}
        return {**answer, "b": data} if sample.get("back") else answer


def _pretend_internal_errors() -> None:
    """Let this process answer `internal`, as only a broken worker does: a handler's own errors never mean the pool's."""
    from gpupool.errors import ErrorCode
    from gpupool.worker import faults

    faults._HANDLER_CODES |= {ErrorCode.INTERNAL}  # type: ignore[misc]
