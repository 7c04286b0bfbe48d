"""What the exporter of traces needs from the host: its library, and the headers that a collector asks for, which may be secrets."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from typing import Final

_LIBRARIES: Final = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
_MAX_BYTES: Final = 16 * 1024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
#: A field's name and value as RFC 9110 has them, ASCII only.
_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([!-~](?:[ -~\t]*[!-~])?)[ \t]*")


class HeadersError(Exception):
    """A file that holds no headers, or that others may read. Says nothing of what it holds."""


def exporter_missing() -> str:
    """Return the name of a package that exporting traces needs and that is not installed; "" when all are. Imports none of them."""
    for module, package in _LIBRARIES.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ImportError:  # a parent of it is not there
            found = False
        if not found:
            return package
    return ""


def read_headers(path: str) -> dict[str, str]:
    """Read lines of "Name: value"; empty ones and those that begin with # are passed over.

    Raises:
        HeadersError: when the file cannot be read, holds anything else, or may be read by others than its owner.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without waiting: opening a FIFO would
    except OSError as e:
        raise HeadersError(f"{path}: cannot be read: {e.strerror or e}") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise HeadersError(f"{path}: is no file")
        if about.st_mode & _OTHERS:
            mode = stat.S_IMODE(about.st_mode)
            raise HeadersError(f"{path}: others than its owner may use it (mode {mode:04o}); chmod 600 it")
        data = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MAX_BYTES:
        raise HeadersError(f"{path}: has more than {_MAX_BYTES} bytes")
    headers: dict[str, str] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (match := _LINE.fullmatch(line)):
            raise HeadersError(f'{path}: line {number} is not "Name: value" in ASCII')
        headers[match[1]] = match[2]
    return headers
