"""Where a card sits in the host: the CPUs next to it, and how many threads each worker on that node should use.

A worker far from its card pays for every copy; one thread pool per worker, each sized to the whole host, costs more than that. Both are
read from /sys, which needs neither the driver nor a library. What is not certain is left alone: no node (-1, as on a host with one),
or a process that may not use all of the node's CPUs, since then somebody else has decided already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")
#: No host has more: a bound for what a broken file may make of us.
_MAX_CPU: Final = 65535


def parse_cpulist(text: str) -> frozenset[int]:
    """Read the kernel's list format, "0-3,8,10-11"; an empty text is an empty set.

    Raises:
        ValueError: it is something else.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, dash, last = part.partition("-")
        low = int(first)
        high = int(last) if dash else low
        if not 0 <= low <= high <= _MAX_CPU:
            raise ValueError(f"not a list of CPUs: {text.strip()[:80]!r}")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def near_cpus(numa_node: str, local_cpulist: str, allowed: AbstractSet[int]) -> frozenset[int] | None:
    """CPUs to pin a card's worker to, from the two files of its PCI device; None: leave it unpinned.

    Args:
        numa_node: content of `numa_node`.
        local_cpulist: content of `local_cpulist`.
        allowed: CPUs that the supervisor itself may use.
    """
    try:
        node, cpus = int(numa_node), parse_cpulist(local_cpulist)
    except ValueError:
        return None
    return cpus if node >= 0 and cpus and cpus <= allowed else None


def physical_cores(cpus: Iterable[int], siblings: Mapping[int, str]) -> int:
    """Count cores: hardware threads of one core, as `thread_siblings_list` groups them, are one. Unknown CPUs count one each."""
    cores: set[frozenset[int]] = set()
    for cpu in cpus:
        try:
            group = parse_cpulist(siblings[cpu])
        except (KeyError, ValueError):
            group = frozenset()
        cores.add(group or frozenset({cpu}))
    return len(cores)


def threads_per_worker(cores: int, workers: int) -> int:
    """Size of each thread pool of one worker when so many share these cores."""
    return max(1, cores // max(1, workers))


def cpus_of(bus: str, allowed: AbstractSet[int], root: Path = SYS) -> frozenset[int] | None:
    """CPUs next to the PCI device `bus` ("0000:3b:00.0"); None: leave its worker unpinned."""
    device = root / "bus/pci/devices" / bus
    try:
        return near_cpus((device / "numa_node").read_text(), (device / "local_cpulist").read_text(), allowed)
    except OSError:
        return None


def cores_of(cpus: Iterable[int], root: Path = SYS) -> int:
    """Count the physical cores among these CPUs."""
    siblings: dict[int, str] = {}
    wanted = sorted(cpus)
    for cpu in wanted:
        with suppress(OSError):
            siblings[cpu] = (root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    return physical_cores(wanted, siblings)
