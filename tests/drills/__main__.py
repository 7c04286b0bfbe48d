"""`python -m drills` (with tests/ on the path): every fault at every moment, on real pools under load, as one table.

Exit code 1 when a request was lost, somebody else was killed, or a fault was not noticed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from drills.cgroup import ConfinedPool, memory_group
from drills.matrix import FAULTS, MOMENTS, OOM, Cell, Fault, Ground
from support.running import RunningPool


def main() -> int:
    """Try all cells and print what was measured."""
    began = time.monotonic()
    print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the start; 2 workers, 50 requests/s from a client all the time"
    )
    print(
        "Limits: beat 1 s, batch 2 s, load 5 s, no restart delay. Each cell: noticed after, requests lost, wrong kills, all back after.\n"
    )
    print(f"| fault | {' | '.join(MOMENTS)} |\n|{' --- |' * (1 + len(MOMENTS))}")
    sound: list[bool] = []
    with ground() as usual:
        sound += [row(usual, fault) for fault in FAULTS]
    try:
        with memory_group() as group, ground(partial(ConfinedPool, group=group)) as confined:
            sound.append(row(confined, OOM))
    except OSError as e:
        with ground() as usual:
            stand_in = Fault(
                f"OOM kill (SIGKILL in its place, no memory limit can be set here: {e})", MOMENTS, signal="SIGKILL"
            )
            sound.append(row(usual, stand_in))
    print(f"\n{time.monotonic() - began:.0f} s")
    return 0 if all(sound) else 1


@contextmanager
def ground(make: Callable[..., RunningPool] = RunningPool) -> Iterator[Ground]:
    """A pool that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="gpupool-drills-") as folder:
        ground = Ground(Path(folder) / "pool", make)
        try:
            yield ground
        finally:
            ground.pool.close()


def row(ground: Ground, fault: Fault) -> bool:
    """Try a fault at its moments and print the row; whether all went as it must."""
    cells = [ground.measure(fault, moment) if moment in fault.moments else None for moment in MOMENTS]
    causes = dict.fromkeys(cell.cause for cell in cells if cell and cell.cause)
    told = f" (told: {'; '.join(causes)})" if fault is OOM else ""
    texts = [cell.text(fault) if cell else "-" for cell in cells]
    print(f"| {fault.name}{told} | {' | '.join(texts)} |", flush=True)
    return sound(fault, [cell for cell in cells if cell])


def sound(fault: Fault, cells: Sequence[Cell]) -> bool:
    """Whether nothing was lost, nobody else killed, and everything noticed."""
    return all(
        not cell.lost and not cell.wrong_kills and (not fault.deadly or None not in (cell.detected_s, cell.back_s))
        for cell in cells
    )


if __name__ == "__main__":
    sys.exit(main())
