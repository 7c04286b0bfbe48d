"""Which devices the pool has and how each worker is pinned to its one.

`auto` means every visible GPU, else one CPU device. GPUs are named by UUID, since that is the one name on which CUDA, NVML and MIG agree;
the inventory comes from a short-lived process (see inventory), for NVML may hang and the supervisor may not.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: The first NVML call on a host whose driver must still load can take seconds.
_INVENTORY_TIMEOUT_S: Final = 20.0


class DeviceError(Exception):
    """The configured devices do not fit this host; says which and why."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the pool."""

    kind: str  # "cpu" or "gpu"
    id: str  # "cpu:0", or the UUID
    name: str
    health: str = "ok"
    bus: str = ""  # of a GPU: its PCI address as in /sys/bus/pci/devices

    @property
    def torch_name(self) -> str:
        """The name inside the worker, which sees this one device only."""
        return "cpu" if self.kind == "cpu" else "cuda:0"

    def environment(self) -> dict[str, str]:
        """What pins a process to it. It must be in place before the process starts: CUDA reads it once."""
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "" if self.kind == "cpu" else self.id}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card or MIG instance, as the inventory names it; `index` is its place in bus order."""

    index: int
    uuid: str
    name: str
    mig: tuple[str, ...] = ()
    bus: str = ""


def choose(configured: str | Sequence[int | str], environment: Mapping[str, str]) -> list[Device]:
    """Resolve the configuration's `devices`.

    Raises:
        DeviceError: an unknown or doubled device, GPUs asked for where there are none, or `auto` on a host whose GPUs are in trouble:
            it would else quietly serve from the CPU.
    """
    if isinstance(configured, str) and configured.startswith("cpu:"):
        return cpu_devices(int(configured.removeprefix("cpu:")))
    gpus, problem, absent = inventory()
    visible = visible_gpus(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    if configured == "auto":
        if not gpus and not absent:
            raise DeviceError(f'pool.devices: "auto" cannot see the GPUs: {problem}; mend that, or say "cpu:1" to do without')
        found = [Device("gpu", uuid, g.name, bus=g.bus) for g in visible for uuid in (g.mig or (g.uuid,))]
        return found or cpu_devices(1)
    if not gpus:
        raise DeviceError(f"pool.devices: GPUs are asked for, but none can be seen: {problem or 'NVML counts none'}")
    return [resolve(name, visible) for name in _once(list(configured))]


def cpu_devices(count: int) -> list[Device]:
    """Make CPU devices: several processes that share the machine's cores."""
    return [Device("cpu", f"cpu:{n}", platform.processor() or platform.machine()) for n in range(count)]


def resolve(name: int | str, gpus: Sequence[Gpu]) -> Device:
    """Find one configured name among the visible GPUs: bus index, UUID (or a unique start of one), MIG UUID.

    Raises:
        DeviceError: not there, or not unique.
    """
    if isinstance(name, int) or name.isdigit():
        found = [(g.uuid, g) for g in gpus if g.index == int(name)]
    else:
        names = [(uuid, g) for g in gpus for uuid in (g.uuid, *g.mig)]
        found = [n for n in names if n[0] == name] or [n for n in names if n[0].startswith(name)]
    if len(found) != 1:
        known = ", ".join(f"{g.index} = {g.uuid}" for g in gpus) or "none"
        raise DeviceError(f"pool.devices: {name!r} is {'not unique' if found else 'unknown'}; visible GPUs: {known}")
    uuid, gpu = found[0]
    return Device("gpu", uuid, gpu.name, bus=gpu.bus)


def visible_gpus(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """Apply the operator's CUDA_VISIBLE_DEVICES: unset means all, empty means none, names that nobody knows are refused.

    Raises:
        DeviceError: an unknown or doubled name. (CUDA itself would silently cut the list there.)
    """
    if variable is None:
        return list(gpus)
    wanted: list[Gpu] = []
    for token in _once([t.strip() for t in variable.split(",") if t.strip()], "CUDA_VISIBLE_DEVICES"):
        device = resolve(token, gpus)
        gpu = next(g for g in gpus if device.id == g.uuid or device.id in g.mig)
        wanted.append(gpu if device.id == gpu.uuid else Gpu(gpu.index, device.id, gpu.name, bus=gpu.bus))
    return wanted


def inventory() -> tuple[list[Gpu], str, bool]:
    """Ask a short-lived process for the GPUs in bus order. Without any: the reason, and whether the host simply has none."""
    command = [sys.executable, "-P", "-m", "gpupool.supervisor.cards.inventory"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_INVENTORY_TIMEOUT_S, check=False)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return [], f"NVML did not answer within {_INVENTORY_TIMEOUT_S:g} s", False
    except (OSError, ValueError) as e:
        return [], f"the inventory failed: {e}", False
    gpus = [Gpu(g["index"], g["uuid"], g["name"], tuple(g["mig"]), g["bus"]) for g in answer["gpus"]]
    return gpus, answer["problem"], answer["absent"]


def _once(names: list[int | str] | list[str], where: str = "pool.devices") -> list[Any]:
    for name in names:
        if names.count(name) > 1:  # type: ignore[arg-type]
            raise DeviceError(f"{where}: {name!r} stands there twice")
    return list(names)
