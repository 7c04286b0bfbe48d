"""`gpupool call`: one request from the shell; the reply, or the error, as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Annotated, Any, Final

import typer

from gpupool.errors import DeadlineExceeded, GpuPoolError
from gpupool.exits import Exit
from gpupool.keys import ENV_KEY_FILE, is_key

from .control import status_of, unreachable
from .options import JsonOption, RuntimeDirOption, positive, runtime_of
from .output import Failure, print_json

#: A router that does not answer a ping within this time is not there: without asking, that and a slow model would look the same.
_PING_TIMEOUT_S: Final = 3.0


def call(
    sample: Annotated[str, typer.Argument(metavar="JSON or -", help="The sample; - reads it from stdin.")] = "-",
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="Default: the pool's first.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", callback=positive, help="Seconds to wait.")] = 30.0,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="E", help="The router's address. Default: ask the pool.", show_default=False),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", metavar="FILE", envvar=ENV_KEY_FILE, help="Our own secret key, for a pool with CURVE.", show_default=False
        ),
    ] = None,
    server_key: Annotated[
        str | None,
        typer.Option(
            "--server-key", metavar="KEY", help="The pool's public key, or its file. Default: ask the pool.", show_default=False
        ),
    ] = None,
    json_output: JsonOption = False,  # noqa: ARG001 - a reply is JSON with or without it
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Send one request and print the reply as JSON."""
    value = _parsed(sys.stdin.read() if sample == "-" else sample)
    address, keys = _whereto(endpoint, server_key, key, runtime_dir)
    from gpupool.client import Client  # late: zmq

    try:
        client = Client(address, timeout=timeout, **keys)
    except ValueError as e:
        raise Failure("usage", str(e), Exit.USAGE) from None
    with client:
        try:
            client.ping(timeout=_PING_TIMEOUT_S)
        except GpuPoolError:
            why = ", or it does not know our key" if keys else ""
            raise unreachable("unreachable", f"no router answers at {address}{why}") from None
        try:
            reply = client.infer(value, model=model, timeout=timeout)
        except DeadlineExceeded as error:
            raise Failure(error.code, error.message or f"no reply within {timeout:g} s", Exit.TIMEOUT, retryable=True) from None
        except GpuPoolError as error:
            details = {"retryable": error.retryable, "retry_after_ms": error.retry_after_ms, "field": error.field}
            told = {key: detail for key, detail in details.items() if detail is not None}
            raise Failure(error.code, error.message or str(error.code), Exit.FAILED, **told) from None
    fields = ("result", "model", "version", "worker", "attempts", "timings_ms")
    print_json({field: getattr(reply, field) for field in fields})
    return Exit.OK


def _whereto(
    endpoint: str | None, server_key: str | None, key: str | None, runtime_dir: str | None
) -> tuple[str, dict[str, Any]]:
    """Find the router's address, and the keys to go there with: none for plaintext."""
    if endpoint is None:
        router = status_of(runtime_of(runtime_dir)).get("router") or {}
        endpoint = reachable(_bound(router))
        server_key = server_key or (router.get("curve") or {}).get("public_key")
    if server_key is None:
        if key and key != os.environ.get(ENV_KEY_FILE):  # one that the environment names is for pools with CURVE
            raise Failure("usage", "--key is of no use: this pool is not encrypted, or --server-key is missing", Exit.USAGE)
        return endpoint, {}
    if not key:
        text = f"this pool lets in only clients whose key it knows: give --key FILE, or set {ENV_KEY_FILE}"
        raise Failure("no_key", text, Exit.USAGE)
    if is_key(key):
        raise Failure("usage", "--key wants a file: a key on the command line is for all to see", Exit.USAGE)
    return endpoint, {"server_key": server_key, "secret_key": key}


def reachable(bound: str) -> str:
    """Turn an address that a router listens on into one that a client can go to: every interface has the loopback one."""
    for anywhere in ("tcp://0.0.0.0:", "tcp://*:"):
        if bound.startswith(anywhere):
            return "tcp://127.0.0.1:" + bound.removeprefix(anywhere)
    return bound


def _bound(router: dict[str, Any]) -> str:
    addresses = router.get("bind") or []
    if not addresses:
        raise Failure("no_router", "the pool's router is not up", Exit.FAILED)
    return str(addresses[0])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as e:
        raise Failure("bad_json", f"the sample is not JSON: {e}", Exit.USAGE) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is larger than any number")
    return number
