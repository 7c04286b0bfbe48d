"""What a command prints: results on stdout, everything else on stderr, and a failure in the same form as a result would have had."""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from gpupool.exits import Exit
from gpupool.visible import visible_lines

#: By the shell's convention 128 + SIGINT.
INTERRUPTED = 130


class Failure(Exception):
    """The command failed: a stable `code` for programs, a message for people, the exit code of the process."""

    def __init__(self, code: str, message: str, exit_code: int = Exit.FAILED, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.exit_code = int(exit_code)
        self.details = details


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout."""
    print(json.dumps(plain(value), ensure_ascii=False), flush=True)


def print_text(text: str, *, file: TextIO | None = None) -> None:
    """Print lines for people, on stdout unless told otherwise, without what would command their terminal."""
    print(visible_lines(text), file=file, flush=True)


def report(failure: Failure, *, as_json: bool) -> None:
    """Tell of a failure: always on stderr, and as the one JSON value of stdout where that was asked for."""
    if as_json:
        print_json({"error": {"code": failure.code, "message": failure.message, **failure.details}})
    print_text(f"gpupool: {failure.message}", file=sys.stderr)


def plain(value: Any) -> Any:
    """Make JSON of what models return: arrays become lists, bytes base64 text, NaN and infinity null, other keys than text are quoted."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode("ascii")
    # numpy's arrays and scalars, torch's tensors: asked by their common method, so that neither is imported.
    as_list = getattr(value, "tolist", None)
    return plain(as_list()) if callable(as_list) else str(value)
