"""Inventory and probe on a real card with a real driver."""

from __future__ import annotations

import pytest

from gpupool.supervisor.cards.reading import reading_from
from gpupool.supervisor.devices import inventory
from support.fake_cards import ProbeProcess

pytestmark = [pytest.mark.gpu, pytest.mark.processes]


def test_a_real_card_is_read_and_asks_for_no_recovery() -> None:
    gpus, problem = inventory().gpus, inventory().problem
    if not gpus:
        pytest.skip(f"no GPU: {problem}")
    uuids = [uuid for gpu in gpus for uuid in (gpu.mig or (gpu.uuid,))]
    probe = ProbeProcess({}, uuids, kernel_log=True)
    try:
        probe.wait_for("up")
        for gpu, uuid in zip(gpus, uuids, strict=False):
            reading = reading_from(probe.card(uuid))
            print(probe.wait_for("up"), reading)  # what the driver knows and what it does not, for the record
            assert reading is not None
            assert (reading.error, reading.lost) == (None, False)
            assert not reading.recovery_action
            assert reading.bus == gpu.bus
            assert reading.memory_total_bytes is None or reading.memory_total_bytes > 1 << 30
            assert reading.temperature_c is None or 0 < reading.temperature_c < 120
    finally:
        probe.close()
