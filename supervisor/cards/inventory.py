"""`python -m gpupool.supervisor.cards.inventory`: the GPUs as NVML names them, one JSON value on stdout, then the end.

A process of its own, because an NVML call can hang for ever; the asker waits for a bounded time and goes on without.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def read() -> dict[str, Any]:
    """Return {"gpus": [{index, uuid, name, mig, bus}], "problem", "absent", "silent"}.

    `index` is the place in bus order among those that answer, `problem` why there are none, `absent` whether the host simply has none,
    `silent` how many cards are there and do not answer: with such a one the indexes of the others cannot be told.
    """
    try:
        import pynvml
    except ImportError as e:
        return {"gpus": [], "problem": f"nvidia-ml-py cannot be imported: {e}", "absent": True, "silent": 0}
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as e:
        # No library and no driver are how a host without GPUs looks; anything else is a host with GPUs in trouble.
        absent = e.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return {"gpus": [], "problem": f"NVML: {e}", "absent": absent, "silent": 0}
    gpus, silent = [], 0
    for n in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(n)
            bus = pynvml.nvmlDeviceGetPciInfo(handle)
            order = (bus.domain, bus.bus, bus.device)
            gpus.append(
                (
                    order,
                    {
                        "uuid": _text(pynvml.nvmlDeviceGetUUID, handle),
                        "name": _text(pynvml.nvmlDeviceGetName, handle),
                        "mig": _mig(pynvml, handle),
                        "bus": f"{bus.domain:04x}:{bus.bus:02x}:{bus.device:02x}.0",
                    },
                )
            )
        except pynvml.NVMLError:
            silent += 1  # a lost card is not one to start on; the others are
    ordered = [gpu for _, gpu in sorted(gpus, key=lambda pair: pair[0])]
    return {
        "gpus": [{"index": n, **gpu} for n, gpu in enumerate(ordered)],
        "problem": "",
        "absent": not count,
        "silent": silent,
    }


def _mig(pynvml: Any, handle: Any) -> list[str]:
    """UUIDs of the MIG instances of a card in MIG mode."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return []
    found = []
    for n in range(count):
        try:
            found.append(_text(pynvml.nvmlDeviceGetUUID, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n)))
        except pynvml.NVMLError:
            continue
    return found


def _text(call: Callable[[Any], str | bytes], handle: Any) -> str:
    """Names arrive as bytes from older bindings; newer ones raise when a card's name is no text."""
    try:
        value = call(handle)
    except UnicodeDecodeError as e:
        value = e.object
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


if __name__ == "__main__":
    print(json.dumps(read()))
