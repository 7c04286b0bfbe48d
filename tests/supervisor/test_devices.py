"""Which device a name means, and what pins a worker to it."""

from __future__ import annotations

import pytest

from gpupool.supervisor.devices import DeviceError, DeviceTrouble, Gpu, Inventory, choose, cpu_devices, resolve, visible_gpus

A, B, C = "GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"
GPUS = [Gpu(0, A, "H200"), Gpu(1, B, "H200"), Gpu(2, C, "A100", ("MIG-1", "MIG-2"))]


def uuids(variable: str | None) -> list[str]:
    return [g.uuid for g in visible_gpus(GPUS, variable)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, [A, B, C]), ("", []), ("2,0", [C, A]), (B, [B]), ("GPU-bb", [B]), ("MIG-2", ["MIG-2"]), (" 1 , 0 ", [B, A])],
)
def test_the_operators_visibility_is_respected(variable: str | None, expected: list[str]) -> None:
    assert uuids(variable) == expected


@pytest.mark.parametrize("variable", ["0,0", "7", "GPU-x", "GPU-"])
def test_doubled_unknown_and_ambiguous_names_are_refused(variable: str) -> None:
    with pytest.raises(DeviceError):
        uuids(variable)


def test_an_unknown_device_is_refused_with_those_that_exist() -> None:
    with pytest.raises(DeviceError, match="7 is unknown; visible GPUs: 0 = GPU-aaaa-1"):
        resolve(7, GPUS)


def test_a_gpu_worker_sees_its_one_card_in_bus_order_and_a_cpu_worker_none() -> None:
    assert resolve(1, GPUS).environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": B}
    assert cpu_devices(1)[0].environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_cpu_devices_are_as_many_as_asked_for() -> None:
    assert [d.id for d in choose("cpu:3", {})] == ["cpu:0", "cpu:1", "cpu:2"]


def test_a_silent_card_may_be_named_by_its_uuid_and_a_hidden_one_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = "GPU-40000000-aaaa-bbbb-cccc-000000000004"
    whole = [Gpu(n, f"GPU-{n}0000000-aaaa-bbbb-cccc-00000000000{n}", "H200") for n in range(3)]
    monkeypatch.setattr("gpupool.supervisor.devices.inventory", lambda: Inventory(whole, "", absent=False, silent=1))
    told: list[str] = []
    assert [d.id for d in choose([whole[0].uuid, silent], {}, told.append)] == [whole[0].uuid, silent]
    assert told == ["1 of 4 GPUs do not answer"]
    visible = {"CUDA_VISIBLE_DEVICES": f"{whole[0].uuid},{silent}"}
    assert [d.id for d in choose([silent], visible)] == [silent]
    assert [d.id for d in choose("auto", visible)] == [whole[0].uuid]
    with pytest.raises(DeviceError, match="unknown"):
        choose([whole[2].uuid], {"CUDA_VISIBLE_DEVICES": whole[0].uuid})
    with pytest.raises(DeviceTrouble, match="name UUIDs"):
        choose([0], {})
    with pytest.raises(DeviceError, match="unknown"):  # the operator hides all but the first, the silent one too
        choose([whole[0].uuid, silent], {"CUDA_VISIBLE_DEVICES": whole[0].uuid})
