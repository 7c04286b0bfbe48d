"""The inventory process and the choice of devices, with the real nvidia-ml-py on pretended cards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpupool.supervisor.devices import DeviceError, choose, inventory
from support.fake_cards import BUSES, UUIDS, FakeCards

pytestmark = pytest.mark.processes

#: UUIDS as they sit on the bus.
ON_THE_BUS = [uuid for _, uuid in sorted(zip(BUSES, UUIDS, strict=True))]


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCards:
    cards = FakeCards(tmp_path)
    for name, value in cards.environment().items():
        monkeypatch.setenv(name, value)
    return cards


def ids(configured: Any, visible: str | None = None) -> list[str]:
    return [d.id for d in choose(configured, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})]


def test_cards_are_numbered_by_their_place_on_the_bus_as_cuda_does(cards: FakeCards) -> None:
    found = inventory()
    assert (found.problem, found.absent, found.silent) == ("", False, 0)
    assert [(g.index, g.uuid, g.bus) for g in found.gpus] == [
        (n, uuid, BUSES[UUIDS.index(uuid)]) for n, uuid in enumerate(ON_THE_BUS)
    ]
    assert ids("auto") == ON_THE_BUS
    assert ids([2, 0]) == [ON_THE_BUS[2], ON_THE_BUS[0]]


def test_each_worker_gets_one_uuid_and_bus_order_and_knows_its_bus(cards: FakeCards) -> None:
    (device,) = choose([3], {})
    assert device.environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": UUIDS[2]}
    assert (device.name, device.bus) == ("Fake H200", BUSES[2])


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2,0", [ON_THE_BUS[2], ON_THE_BUS[0]]), (UUIDS[1], [UUIDS[1]]), ("GPU-3", [UUIDS[3]]), ("MIG-a", ["MIG-a"])],
)
def test_the_operators_visibility_holds_for_real_names(cards: FakeCards, visible: str, expected: list[str]) -> None:
    cards.say(f"gpu {UUIDS[2]} mig=1,1")
    cards.say(f"gpu MIG-a parent={UUIDS[2]}")
    assert ids("auto", visible) == expected


@pytest.mark.parametrize("visible", ["0,0", "7", "GPU-nobody", "GPU-"])
def test_doubled_unknown_and_ambiguous_names_are_refused(cards: FakeCards, visible: str) -> None:
    with pytest.raises(DeviceError):
        ids("auto", visible)


def test_an_empty_visibility_means_no_gpus(cards: FakeCards) -> None:
    assert ids("auto", "") == ["cpu:0"]
    with pytest.raises(DeviceError):
        ids([0], "")


def test_a_card_in_mig_mode_is_its_instances(cards: FakeCards) -> None:
    cards.say(f"gpu {UUIDS[1]} mig=1,1")
    cards.say(f"gpu MIG-a parent={UUIDS[1]}")
    cards.say(f"gpu MIG-b parent={UUIDS[1]}")
    assert ids("auto") == ["MIG-a", "MIG-b", *ON_THE_BUS[1:]]
    assert choose(["MIG-b"], {})[0].bus == BUSES[1]


def test_a_lost_card_is_left_out_and_the_others_are_found(cards: FakeCards) -> None:
    cards.say(f"gpu {UUIDS[1]} state=lost")
    assert ids("auto") == [u for u in ON_THE_BUS if u != UUIDS[1]]


def test_a_name_that_is_no_text_costs_nothing(cards: FakeCards) -> None:
    cards.say(b"gpu " + UUIDS[0].encode() + b' name="\xffH200"')
    assert choose([UUIDS[0]], {})[0].name == "�H200"


@pytest.mark.parametrize(
    ("line", "reason"),
    [("fail nvmlInit LIB_RM_VERSION_MISMATCH", "mismatch"), ("fail nvmlInit DRIVER_NOT_LOADED", "Not Loaded"),
     ("fail nvmlDeviceGetCount UNKNOWN", "Unknown")],
)  # fmt: skip
def test_a_driver_that_cannot_be_used_is_a_reason_and_no_trace(cards: FakeCards, line: str, reason: str) -> None:
    cards.say(line)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpupool.supervisor.cards.inventory"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["gpus"] == []
    assert reason.lower() in answer["problem"].lower()
    with pytest.raises(DeviceError, match=r"see the GPUs: NVML|can be seen: NVML"):
        ids([0])
