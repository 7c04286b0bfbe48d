"""`gpupool keygen`: make the CURVE key pair of a pool or of a client."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from gpupool.exits import Exit
from gpupool.keys import NAME, PUBLIC_SUFFIX, SECRET_SUFFIX, certificate

from .options import JsonOption
from .output import Failure, print_json, print_text


def keygen(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; the files are called after it.")] = "pool",
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where to; made if it is not there.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there: the old key is lost.")] = False,
    json_output: JsonOption = False,
) -> int:
    """Make a key pair: NAME.key may be given to anybody, NAME.key_secret to nobody."""
    if not NAME.fullmatch(name):
        raise typer.BadParameter(
            "a name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with one of the first two"
        )
    import zmq  # late: a command that only asks the pool does not pay for it

    if not zmq.has("curve"):
        raise Failure("no_curve", "this installation's ZeroMQ was built without CURVE")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    public_file, secret_file = directory / f"{name}{PUBLIC_SUFFIX}", directory / f"{name}{SECRET_SUFFIX}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not force and (there := [str(file) for file in (public_file, secret_file) if os.path.lexists(file)]):
            raise FileExistsError(None, "is there already; --force replaces it, and then its old key is lost", there[0])
        _write(secret_file, certificate(public, secret), 0o600, force=force)
        _write(public_file, certificate(public), 0o644, force=force)
    except OSError as e:
        raise Failure("cannot_write", f"{e.filename}: {e.strerror or e}") from None
    if json_output:
        print_json(
            {"name": name, "public_key_file": str(public_file), "secret_key_file": str(secret_file), "public_key": public}
        )
    else:
        print_text(f"public key:  {public_file}\nsecret key:  {secret_file}\n{public}")
    return Exit.OK


def _write(file: Path, text: str, mode: int, *, force: bool) -> None:
    """Write a file that is new, so that nobody holds it open from a time of other permissions."""
    if force:
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        os.fchmod(descriptor, mode)
        stream.write(text)
