"""CURVE keys in files: the certificate format of zmq.auth, or the 40 characters of one key alone. Needs no ZeroMQ.

No message of this module ever quotes what a file contains: it may be a secret.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

#: What a client may be called: the stem of its key file.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - the end of a name
ENV_KEY_FILE: Final = "GPUPOOL_KEY_FILE"

_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_DIGITS: Final = {character: i for i, character in enumerate(_Z85)}
_LENGTH: Final = 40
#: A certificate has some 500; whatever is larger is something else.
_MAX_BYTES: Final = 16 * 1024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
#: Errors that say nothing about the file: the process, or the host, is short of something.
PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR, errno.ESTALE})


class KeyFileError(ValueError):
    """A key, or the file that should hold one, is of no use; the message names the file and never its content."""


def is_key(text: str) -> bool:
    """Whether this is one key in Z85: 40 characters that stand for 32 bytes."""
    if len(text) != _LENGTH or any(character not in _DIGITS for character in text):
        return False
    for i in range(0, _LENGTH, 5):
        value = 0
        for character in text[i : i + 5]:
            value = value * 85 + _DIGITS[character]
        if value >> 32:
            return False
    return True


def read_public(path: str | os.PathLike[str]) -> str:
    """Read a public key.

    Raises:
        KeyFileError: when the file holds none.
        OSError: when the process or the host is short of something, which says nothing about the file.
    """
    entries = _entries(Path(path), private=False)
    if "secret-key" in entries:
        raise KeyFileError(f"{path}: holds a secret key, and only a public one belongs here")
    return _one(entries, "public-key", path)


def read_secret(path: str | os.PathLike[str]) -> str:
    """Read a secret key, from a file that nobody but its owner may read.

    Raises:
        KeyFileError: when the file holds none, or others may read it.
        OSError: when the process or the host is short of something, which says nothing about the file.
    """
    return _one(_entries(Path(path), private=True), "secret-key", path)


def certificate(public: str, secret: str | None = None) -> str:
    """Write a key, or a pair, in the format of zmq.auth."""
    kind = "Public Certificate"
    if secret:
        kind = "Secret Certificate\n#   Do not give this file to anybody, nor change its permissions."
    head = f"#   ZeroMQ CURVE {kind}\n#   made on {datetime.now(UTC).isoformat(timespec='seconds')} by gpupool\n\nmetadata\n"
    lines = f'curve\n    public-key = "{public}"\n'
    return head + lines + (f'    secret-key = "{secret}"\n' if secret else "")


def _entries(path: Path, *, private: bool) -> dict[str, str]:
    """Read what a file holds by name; a key that stands alone has the name ''."""
    try:
        # Without waiting: opening a FIFO would.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in PASSING:
            raise
        raise KeyFileError(f"{path}: cannot be read: {e.strerror or e}") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise KeyFileError(f"{path}: is no file")
        if private and about.st_mode & _OTHERS:
            mode = stat.S_IMODE(about.st_mode)
            raise KeyFileError(f"{path}: others than its owner may use it (mode {mode:04o}); chmod 600 it")
        data = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MAX_BYTES:
        raise KeyFileError(f"{path}: has more than {_MAX_BYTES} bytes, which is no key file")
    text = data.decode("ascii", "replace").strip()
    if "\n" not in text and (len(text) == _LENGTH or "=" not in text):  # which is a digit of Z85, too
        return {"": text}
    entries = {}
    for line in map(str.strip, data.decode("utf-8", "replace").splitlines()):
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            entries[name.strip()] = value.strip().strip("\"'")
    return entries


def _one(entries: dict[str, str], name: str, path: str | os.PathLike[str]) -> str:
    key = entries.get(name, entries.get("", ""))
    if not key:
        raise KeyFileError(f"{path}: holds no {name.replace('-', ' ')}")
    if not is_key(key):
        raise KeyFileError(f"{path}: its {name.replace('-', ' ')} is not 40 characters of Z85")
    return key
