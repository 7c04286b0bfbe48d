"""Readings over the channel: what is odd becomes None, never an exception."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from gpupool.supervisor.cards.reading import CardReading, reading_from

FULL = CardReading(
    "GPU-1", "GPU-0", 2, "0000:3b:00.0", "H200", 1, 2, 0.5, 41.0, 300.0, 0x4, 0, remapped_pending=False, remapped_failure=True,
    recovery_action=1, lost=False, error=None, error_code=None,
)  # fmt: skip


def test_a_reading_survives_the_channel() -> None:
    for reading in (FULL, CardReading("GPU-1", "GPU-1", lost=True, error="GPU is lost", error_code=15)):
        assert reading_from(msgpack.unpackb(msgpack.packb(reading.to_message()))) == reading


def test_values_of_a_wrong_type_are_none_and_the_others_stay() -> None:
    odd = {
        **FULL.to_message(),
        "temperature_c": "hot",
        "index": True,
        "lost": 1,
        "name": b"H200",
        "recovery_action": 1.5,
        "new": 7,
    }
    reading = reading_from(odd)
    assert reading is not None
    assert (reading.temperature_c, reading.index, reading.lost, reading.name, reading.recovery_action) == (
        None,
        None,
        False,
        None,
        None,
    )
    assert (reading.power_w, reading.card) == (300.0, "GPU-0")


def test_a_reading_of_nobody_is_none() -> None:
    assert reading_from({}) is None
    assert reading_from({"uuid": 7}) is None


def test_long_texts_are_cut_and_what_is_not_finite_is_left_out() -> None:
    message = CardReading("GPU-1", name="x" * 5000, power_w=float("nan"), temperature_c=float("inf")).to_message()
    assert len(message["name"]) == 200
    assert (message["power_w"], message["temperature_c"]) == (None, None)


@given(
    st.dictionaries(
        st.sampled_from(sorted(FULL.to_message())),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    )
)
def test_no_message_raises(message: dict[str, Any]) -> None:
    reading = reading_from(message)
    assert (reading is None) == (not isinstance(message.get("uuid"), str) or not message["uuid"])


def test_each_reason_for_low_clocks_is_told_and_none_where_the_driver_tells_none() -> None:
    events = CardReading("GPU-1", clocks_reasons=0x4 | 0x40).clocks_events()
    assert events is not None
    assert [name for name, holds in events.items() if holds] == ["sw_power_cap", "hw_thermal_slowdown"]
    assert len(events) == 9
    assert CardReading("GPU-1").clocks_events() is None
