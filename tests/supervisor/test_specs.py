"""What a process is told in its environment."""

from __future__ import annotations

import pytest

from gpupool.supervisor.devices import Device
from gpupool.supervisor.specs import heap_environment

CPU, CARD = Device("cpu", "cpu:0", "CPU"), Device("gpu", "GPU-1", "a card")
NONE_ASIDE = "glibc.malloc.tcache_count=0"


@pytest.mark.parametrize(
    ("limit", "device", "own", "told"),
    [
        (0, CPU, None, None),
        (1 << 30, CARD, None, None),
        (1 << 30, CPU, None, NONE_ASIDE),
        (1 << 30, CPU, "glibc.malloc.check=1", f"glibc.malloc.check=1:{NONE_ASIDE}"),
        (1 << 30, CPU, "glibc.malloc.tcache_count=3", None),
    ],
)
def test_a_limited_heap_keeps_nothing_aside_unless_the_operator_says_so(
    limit: int, device: Device, own: str | None, told: str | None
) -> None:
    inherited = {} if own is None else {"GLIBC_TUNABLES": own}

    assert heap_environment(device, limit, inherited) == ({} if told is None else {"GLIBC_TUNABLES": told})
