"""The written forms inside a configuration: devices, endpoints, addresses, handlers. Pure; each raises `malformed` with what it wants."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Final
from urllib.parse import urlsplit

from gpupool.config_errors import malformed

#: "auto", "cpu:N", or GPU indexes and UUIDs.
Devices = str | tuple[int | str, ...]

MAX_CPU_WORKERS: Final = 256
#: Readings of a worker's memory in the window of the leak watch, at the least: one for each of its cells.
LEAK_LOOKS: Final = 36
_CPU: Final = re.compile(r"cpu:([0-9]{1,4})")
#: CUDA takes a UUID from its first digits on; below eight they say nothing to people. `MIG-GPU-…/1/0` is how older drivers name a slice.
_GPU: Final = re.compile(r"(GPU|MIG|MIG-GPU)-[0-9a-f]{8}[0-9a-f-]{0,28}(/[0-9]{1,2}/[0-9]{1,2})?")
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_HANDLER: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def parse_devices(value: Any) -> Devices:
    """Check [pool] devices."""
    if isinstance(value, str):
        return _device_text(value)
    if not isinstance(value, (list, tuple)):
        raise malformed('"auto", "cpu:N" or a list of GPU indexes and UUIDs')
    if not value:
        raise malformed("at least one device", '"auto" takes every GPU, "cpu:1" one CPU worker')
    for i, device in enumerate(value):
        _check_gpu(device)
        if any(_same(device, other) for other in value[:i]):
            raise malformed("each device once", f"{device!r} stands there twice")
    return tuple(value)


def worker_count(devices: Devices) -> int | None:
    """How many workers a checked `devices` makes, None when only the machine knows."""
    if isinstance(devices, tuple):
        return len(devices)
    return int(devices[4:]) if devices.startswith("cpu:") else None


def _device_text(value: str) -> str:
    if value == "auto":
        return value
    if match := _CPU.fullmatch(value):
        if 1 <= int(match[1]) <= MAX_CPU_WORKERS:
            return f"cpu:{int(match[1])}"
        raise malformed(f'"cpu:N" with N from 1 to {MAX_CPU_WORKERS}')
    hint = {"cpu": 'write "cpu:1"', "": "empty does not mean all"}.get(value, "")
    if _GPU.fullmatch(value) or value.isdigit():
        hint = "GPUs stand in a list, as [0, 1] or with their UUIDs"
    raise malformed('"auto", "cpu:N" or a list of GPU indexes and UUIDs', hint)


def _check_gpu(device: Any) -> None:
    if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < 1024:
        return
    if isinstance(device, str) and _GPU.fullmatch(device):
        return
    hint = "write indexes without quotes" if isinstance(device, str) and device.isdigit() else f"{device!r} is neither"
    raise malformed('GPU indexes in bus order (0, 1, …) and UUIDs ("GPU-…", "MIG-…")', hint)


def _same(one: int | str, other: int | str) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one.startswith(other) or other.startswith(one)
    return one == other


def parse_endpoint(value: Any) -> str:
    """Check one ZeroMQ address of [router] bind."""
    if not isinstance(value, str):
        raise malformed('an address like "tcp://127.0.0.1:5555"')
    scheme, separator, rest = value.partition("://")
    if not separator or scheme not in {"tcp", "ipc"}:
        raise malformed('an address that starts with "tcp://" or "ipc://"')
    if scheme == "ipc":
        if not rest or rest.startswith("@") or "\0" in rest:
            raise malformed('a socket path after "ipc://"', "abstract sockets are not supported" if rest[:1] == "@" else "")
        return value
    host, port = _split_host(rest)
    if not (host == "*" or _is_host(host)) or not (port == "*" or _is_port(port)):
        raise malformed('"tcp://HOST:PORT" with a port up to 65535')
    return value


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine can reach a checked endpoint."""
    if not endpoint.startswith("tcp://"):
        return True
    host, _ = _split_host(endpoint.removeprefix("tcp://"))
    if host in {"localhost", "lo"}:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(value: Any) -> str:
    """Check a "HOST:PORT", or "" for none."""
    if value == "":
        return ""
    if isinstance(value, str):
        host, port = _split_host(value)
        if _is_host(host) and _is_port(port):
            return value
    raise malformed('"HOST:PORT" with a port up to 65535, or "" for none')


def parse_url(value: Any) -> str:
    """Check a URL of HTTP, or "" for none. A password in it would stand in every place that shows the configuration."""
    if value == "":
        return ""
    form = 'a URL like "http://127.0.0.1:4318/v1/traces", or "" for none'
    if not isinstance(value, str) or not re.fullmatch(r"https?://[!-~]{1,2000}", value):
        raise malformed(form)
    try:
        parts = urlsplit(value)
        well = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        well = False
    if not well:
        raise malformed(form)
    if "@" in parts.netloc:
        raise malformed("a URL without a user or a password", "what a collector is to be told of us stands in headers_file")
    return value


def parse_path(value: Any) -> str:
    """Check a path: text that the kernel can take."""
    if isinstance(value, str) and "\0" not in value:
        return value
    raise malformed("a path, as text in quotes")


def parse_handler(value: Any) -> str:
    """Check a "pkg.module:Class"."""
    if isinstance(value, str) and (value == "" or _HANDLER.fullmatch(value)):
        return value
    hint = ""
    if isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)+", value):
        module, _, name = value.rpartition(".")
        hint = f'did you mean "{module}:{name}"?'
    raise malformed('an import path like "pkg.module:Class"', hint)


def parse_allocator(value: Any) -> str:
    """Check a PyTorch allocator setting: "option:value,option:value"."""
    if isinstance(value, str) and (value == "" or re.fullmatch(r"[a-z_0-9]+:[!-~]+", value)):
        return value
    raise malformed('PyTorch\'s "option:value,option:value"', 'as in "expandable_segments:True"')


def _split_host(text: str) -> tuple[str, str]:
    host, _, port = text.rpartition(":")
    return host, port


def _is_host(text: str) -> bool:
    if text.startswith("["):
        raise malformed("an IPv4 address or a host name", "IPv6 is not supported yet")
    return _HOST.fullmatch(text) is not None


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) <= 65535
