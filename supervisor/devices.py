"""Which devices the pool has and how each worker is pinned to its one.

`auto` means every visible GPU, else one CPU device. GPUs are named by UUID, since that is the one name on which CUDA, NVML and MIG agree;
the inventory comes from a short-lived process (see inventory), for NVML may hang and the supervisor may not.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

#: The first NVML call on a host whose driver must still load can take seconds.
_INVENTORY_TIMEOUT_S: Final = 20.0
#: "GPU-" and 36 characters; MIG names are longer.
_WHOLE_UUID: Final = 40


class DeviceError(Exception):
    """The configured devices do not fit this host; says which and why."""


class DeviceTrouble(DeviceError):
    """The devices are configured well and do not answer now: another start may find them well."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the pool."""

    kind: str  # "cpu" or "gpu"
    id: str  # "cpu:0", or the UUID
    name: str
    health: str = "ok"
    bus: str = ""  # of a GPU: its PCI address as in /sys/bus/pci/devices
    overflow: bool = False  # extra, for overflow: it does not count as the pool's capacity

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


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs that answer, in bus order; without any, why; whether the host simply has none; how many do not answer."""

    gpus: Sequence[Gpu]
    problem: str
    absent: bool
    silent: int


def choose(
    configured: str | Sequence[int | str], environment: Mapping[str, str], warn: Callable[[str], object] = lambda _: None
) -> list[Device]:
    """Resolve the configuration's `devices`.

    Args:
        configured: the key's value.
        environment: for the operator's CUDA_VISIBLE_DEVICES.
        warn: told of what is passed over.

    Raises:
        DeviceError: an unknown or doubled device, or GPUs asked for where there are none.
        DeviceTrouble: the GPUs are there and do not answer. `auto` would else quietly serve from the CPU, and an index mean another card.
    """
    if isinstance(configured, str) and configured.startswith("cpu:"):
        return cpu_devices(int(configured.removeprefix("cpu:")))
    found = inventory()
    if not found.gpus and not found.absent:
        problem = found.problem or f"{found.silent} cards do not answer"
        raise DeviceTrouble(f'pool.devices: cannot see the GPUs: {problem}; mend that, or say "cpu:1" to do without')
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    names = [] if configured == "auto" else _once(list(configured))
    if found.silent:
        warn(f"{found.silent} of {len(found.gpus) + found.silent} GPUs do not answer")
        if any(str(n).strip().isdigit() for n in [*names, *(variable or "").split(",")]):
            raise DeviceTrouble(
                f"pool.devices: {found.silent} GPUs do not answer, so an index could mean another card than it says; name UUIDs"
            )
    visible = visible_gpus(found.gpus, variable, warn=warn, some_silent=found.silent > 0)
    if configured == "auto":
        if not found.gpus:
            warn(f"no GPU can be seen ({found.problem or 'NVML counts none'}): the pool runs on the CPU")
        return [Device("gpu", uuid, g.name, bus=g.bus) for g in visible for uuid in (g.mig or (g.uuid,))] or cpu_devices(1)
    if not found.gpus:
        raise DeviceError(f"pool.devices: GPUs are asked for, but none can be seen: {found.problem or 'NVML counts none'}")
    # A silent card may be named if the operator hides nothing, or names it too; one that answers and is not visible is hidden.
    answering = {uuid for g in found.gpus for uuid in (g.uuid, *g.mig)}
    shown = None if variable is None else {token.strip() for token in variable.split(",")}

    def may_be_silent(name: int | str) -> bool:
        return found.silent > 0 and name not in answering and (shown is None or name in shown)

    return [resolve(name, visible, some_silent=may_be_silent(name)) for name in names]


def cpu_devices(count: int) -> list[Device]:
    """Make CPU devices: several processes that share the machine's cores."""
    return [Device("cpu", f"cpu:{n}", platform.processor() or platform.machine()) for n in range(count)]


def overflow_devices(count: int) -> list[Device]:
    """Make the CPU devices that take overflow."""
    return [replace(device, id=f"cpu-overflow:{n}", overflow=True) for n, device in enumerate(cpu_devices(count))]


def resolve(name: int | str, gpus: Sequence[Gpu], *, some_silent: bool = False) -> Device:
    """Find one configured name among the visible GPUs: bus index, UUID (or a unique start of one), MIG UUID.

    With `some_silent` a whole UUID that nobody answers to is taken as one of the silent cards: its slot waits until the card is back.

    Raises:
        DeviceError: not there, or not unique.
    """
    if isinstance(name, int) or name.isdigit():
        found = [(g.uuid, g) for g in gpus if g.index == int(name)]
    else:
        names = [(uuid, g) for g in gpus for uuid in (g.uuid, *g.mig)]
        found = [n for n in names if n[0] == name] or [n for n in names if n[0].startswith(name)]
    if not found and some_silent and isinstance(name, str) and len(name) >= _WHOLE_UUID:
        return Device("gpu", name, "does not answer")
    if len(found) != 1:
        known = ", ".join(f"{g.index} = {g.uuid}" for g in gpus) or "none"
        raise DeviceError(f"pool.devices: {name!r} is {'not unique' if found else 'unknown'}; visible GPUs: {known}")
    uuid, gpu = found[0]
    return Device("gpu", uuid, gpu.name, bus=gpu.bus)


def visible_gpus(
    gpus: Sequence[Gpu], variable: str | None, *, warn: Callable[[str], object] = lambda _: None, some_silent: bool = False
) -> list[Gpu]:
    """Apply the operator's CUDA_VISIBLE_DEVICES: unset means all, empty means none, names that nobody knows are refused.

    Raises:
        DeviceError: an unknown or doubled name. (CUDA itself would silently cut the list there.)
    """
    if variable is None:
        return list(gpus)
    wanted: list[Gpu] = []
    for token in _once([t.strip() for t in variable.split(",") if t.strip()], "CUDA_VISIBLE_DEVICES"):
        device = resolve(token, gpus, some_silent=some_silent)
        if some_silent and not any(device.id in (g.uuid, *g.mig) for g in gpus):
            warn(f"CUDA_VISIBLE_DEVICES names {token}, which does not answer")
            continue
        gpu = next(g for g in gpus if device.id == g.uuid or device.id in g.mig)
        wanted.append(gpu if device.id == gpu.uuid else Gpu(gpu.index, device.id, gpu.name, bus=gpu.bus))
    return wanted


def inventory() -> Inventory:
    """Ask a short-lived process for the GPUs."""
    command = [sys.executable, "-P", "-m", "gpupool.supervisor.cards.inventory"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            out, _ = process.communicate(timeout=_INVENTORY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: a process in the driver may not die. Python reaps it later.
            raise
        answer: dict[str, Any] = json.loads(out)
    except subprocess.TimeoutExpired:
        return Inventory([], f"NVML did not answer within {_INVENTORY_TIMEOUT_S:g} s", absent=False, silent=0)
    except (OSError, ValueError) as e:
        return Inventory([], f"the inventory failed: {e}", absent=False, silent=0)
    gpus = [Gpu(g["index"], g["uuid"], g["name"], tuple(g["mig"]), g["bus"]) for g in answer["gpus"]]
    return Inventory(gpus, answer["problem"], absent=answer["absent"], silent=answer["silent"])


def _once(names: list[int | str] | list[str], where: str = "pool.devices") -> list[Any]:
    for name in names:
        if names.count(name) > 1:  # type: ignore[arg-type]
            raise DeviceError(f"{where}: {name!r} stands there twice")
    return list(names)
