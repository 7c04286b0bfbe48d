"""The probe as a real process, with the real nvidia-ml-py, on pretended cards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupool.channel import MAX_MESSAGE_BYTES, Channel
from gpupool.supervisor.cards.health import CardHealth
from gpupool.supervisor.cards.probe import Speaker
from gpupool.supervisor.cards.reading import reading_from
from gpupool.supervisor.cards.verdicts import Lose, Quarantine
from support.fake_cards import BUSES, UUIDS, FakeCards, ProbeProcess

pytestmark = pytest.mark.processes

Start = Callable[..., ProbeProcess]


@pytest.fixture
def cards(tmp_path: Path) -> FakeCards:
    return FakeCards(tmp_path)


@pytest.fixture
def start(cards: FakeCards) -> Iterator[Start]:
    probes: list[ProbeProcess] = []

    def make(devices: list[str] = UUIDS, environment: dict[str, str] | None = None, **spec: Any) -> ProbeProcess:
        probes.append(ProbeProcess({**cards.environment(), **(environment or {})}, devices, **spec))
        return probes[-1]

    yield make
    for probe in probes:
        probe.close()


def hear(probe: ProbeProcess, cards: FakeCards, uuid: str, xid: int) -> dict[str, Any]:
    """Report an XID until the probe hears it: nobody can see from outside when it has begun to listen."""
    seen = len(probe.messages)

    def heard() -> dict[str, Any] | None:
        cards.say(f"event {uuid} xid {xid}")
        probe.card(UUIDS[1] if uuid.startswith("GPU") else uuid)
        return next((m for m in probe.messages[seen:] if m["t"] == "xid" and m["xid"] == xid), None)

    message: dict[str, Any] = probe.until(heard)
    return message


def test_each_card_is_read_by_its_uuid_whatever_the_order_of_enumeration(start: Start, cards: FakeCards) -> None:
    for n, uuid in enumerate(UUIDS):
        cards.say(f"gpu {uuid} temp={40 + n}")

    probe = start([UUIDS[2], UUIDS[0]])

    readings = probe.wait_for("readings")["cards"]
    assert [(c["uuid"], c["index"], c["bus"], c["temperature_c"]) for c in readings] == [
        (UUIDS[2], 2, BUSES[2], 42), (UUIDS[0], 0, BUSES[0], 40),
    ]  # fmt: skip
    assert readings[0] == {
        "uuid": UUIDS[2], "card": UUIDS[2], "index": 2, "bus": BUSES[2], "name": "Fake H200", "memory_used_bytes": 1 << 30,
        "memory_total_bytes": 80 << 30, "utilization": 0.5, "temperature_c": 42, "power_w": 300.0, "clocks_reasons": 0,
        "ecc_uncorrected": 0, "remapped_pending": False, "remapped_failure": False, "recovery_action": 0, "lost": False,
        "error": None, "error_code": None,
    }  # fmt: skip
    assert probe.wait_for("up")["driver"] == "575.57.08"


def test_a_lost_card_is_told_and_its_return_seen_while_the_others_are_read_on(start: Start, cards: FakeCards) -> None:
    probe = start()
    probe.card(UUIDS[1], lambda c: c["temperature_c"] == 41)

    cards.say(f"gpu {UUIDS[1]} state=lost")
    lost = probe.card(UUIDS[1], lambda c: c["lost"])
    assert lost["error_code"] == 15
    assert lost["temperature_c"] is None or isinstance(lost["temperature_c"], int)
    cards.say(f"gpu {UUIDS[0]} temp=77")
    assert not probe.card(UUIDS[0], lambda c: c["temperature_c"] == 77)["lost"]
    cards.say(f"gpu {UUIDS[1]} state=gone")
    assert probe.card(UUIDS[1], lambda c: c["error_code"] == 6)["lost"]

    cards.say(f"gpu {UUIDS[1]} state=ok temp=33")
    back = probe.card(UUIDS[1], lambda c: not c["lost"])
    assert (back["temperature_c"], back["error"]) == (33, None)


def test_a_card_that_needs_a_reset_and_its_recovery_action_are_told(start: Start, cards: FakeCards) -> None:
    cards.say(f"gpu {UUIDS[0]} state=reset")
    cards.say(f"gpu {UUIDS[1]} recovery=4 remapped=0,1,1,1 throttle=0x44 ecc_uncorrected=3")
    probe = start()

    assert probe.card(UUIDS[0])["error_code"] == 16
    odd = probe.card(UUIDS[1])
    assert odd["recovery_action"] == 4
    assert (odd["remapped_pending"], odd["remapped_failure"], odd["clocks_reasons"], odd["ecc_uncorrected"]) == (
        True,
        True,
        0x44,
        3,
    )


def test_xids_arrive_in_order_and_bring_the_next_reading_forward(start: Start, cards: FakeCards) -> None:
    cards.say(f"event {UUIDS[0]} xid 31")  # before it listens: not for us
    probe = start(interval_s=0.2)
    probe.card(UUIDS[0])
    sent = [(UUIDS[3], 63), (UUIDS[0], 13), (UUIDS[3], 94), (UUIDS[2], 48)]

    hear(probe, cards, UUIDS[1], 7)
    for uuid, xid in sent:
        cards.say(f"event {uuid} xid {xid}")
        cards.say(f"event {uuid} sbe 1")
    probe.wait_for("xid", xid=48)

    told = [m for m in probe.messages if m["t"] == "xid" and m["xid"] != 7]
    assert [(m["uuid"], m["xid"]) for m in told] == sent
    assert {m["source"] for m in told} == {"nvml"}


def test_an_xid_of_one_card_is_heard_while_another_is_lost(start: Start, cards: FakeCards) -> None:
    probe = start()
    probe.card(UUIDS[0])
    cards.say(f"gpu {UUIDS[0]} state=lost")
    probe.card(UUIDS[0], lambda c: c["lost"])

    assert hear(probe, cards, UUIDS[1], 94)["uuid"] == UUIDS[1]


def test_no_xid_falls_between_two_sets_of_events(start: Start, cards: FakeCards) -> None:
    probe = start(interval_s=0.05)
    probe.card(UUIDS[0])
    hear(probe, cards, UUIDS[1], 7)
    sent = list(range(100, 140))

    for xid in sent:  # the set is made anew whenever a card comes or goes
        cards.say(f"gpu {UUIDS[0]} state={'gone' if xid % 2 else 'ok'}")
        cards.say(f"event {UUIDS[1]} xid {xid}")
        probe.card(UUIDS[0], lambda c: c["lost"] == bool(xid % 2))  # noqa: B023  # looked at within this round
    probe.wait_for("xid", xid=sent[-1])

    told = [m["xid"] for m in probe.messages if m["t"] == "xid" and m["xid"] != 7]
    assert sorted(set(told)) == sent


def test_what_a_card_lacks_is_null_and_a_name_that_is_no_text_is_shown_as_it_can_be(start: Start, cards: FakeCards) -> None:
    cards.say(b"gpu " + UUIDS[0].encode() + b' name="H200 \xff\xfe" remapped=none recovery=none ecc=none')
    for call in ("UtilizationRates", "PowerUsage", "CurrentClocksEventReasons", "CurrentClocksThrottleReasons"):
        cards.say(f"fail nvmlDeviceGet{call} NOT_SUPPORTED {UUIDS[0]}")
    cards.say(f"fail nvmlDeviceGetIndex FUNCTION_NOT_FOUND {UUIDS[0]}")
    cards.say(f"fail nvmlDeviceGetPciInfo UNKNOWN {UUIDS[0]}")

    card = start().card(UUIDS[0])

    assert card["name"] == "H200 ��"
    lacking = (
        "utilization", "power_w", "clocks_reasons", "index", "bus", "remapped_pending", "recovery_action", "ecc_uncorrected",
        "error", "error_code",
    )  # fmt: skip
    assert {name: card[name] for name in lacking} == dict.fromkeys(lacking)
    assert (card["temperature_c"], card["lost"]) == (41, False)


def test_a_card_that_answers_nothing_is_an_error_and_not_lost(start: Start, cards: FakeCards) -> None:
    cards.say(f"gpu {UUIDS[0]} state=unknown")

    card = start().card(UUIDS[0])

    assert (card["lost"], card["error_code"]) == (False, 999)
    assert "Unknown" in card["error"]


def test_a_mig_instance_is_read_with_its_own_memory_and_its_cards_health(start: Start, cards: FakeCards) -> None:
    cards.say(f"gpu {UUIDS[1]} mig=1,1 recovery=1")
    cards.say(f"gpu MIG-a parent={UUIDS[1]} gi=3 mem_total=20480 mem_used=10")
    cards.say(f"gpu MIG-b parent={UUIDS[1]} gi=4")
    probe = start(["MIG-a", "MIG-b"])

    card = probe.card("MIG-a")
    assert (card["card"], card["bus"], card["memory_total_bytes"], card["recovery_action"]) == (UUIDS[1], BUSES[1], 20 << 30, 1)
    assert card["utilization"] is None

    assert hear(probe, cards, "MIG-b", 94)["uuid"] == "MIG-b"
    cards.say(f"event {UUIDS[1]} xid 95")
    assert probe.wait_for("xid", xid=95)["uuid"] == UUIDS[1]


def test_a_hung_call_hangs_the_probe_alone_which_says_so_and_dies_by_sigkill(start: Start, cards: FakeCards) -> None:
    probe = start()
    probe.card(UUIDS[2])

    cards.say(f"hang nvmlDeviceGetTemperature forever {UUIDS[2]}")

    assert probe.wait_for("stuck") == {"t": "stuck", "uuid": UUIDS[2], "call": "nvmlDeviceGetTemperature"}
    readings = sum(m["t"] == "readings" for m in probe.messages)
    cards.say(f"event {UUIDS[0]} xid 94")  # the other thread still hears
    probe.wait_for("xid", uuid=UUIDS[0])
    assert sum(m["t"] == "readings" for m in probe.messages) == readings
    probe.child.signal(signal.SIGKILL)
    probe.until(lambda: probe.ended)

    successor = start(leave={UUIDS[2]: 600.0})
    assert successor.card(UUIDS[0])["error"] is None
    assert "left alone" in successor.card(UUIDS[2])["error"]


def test_a_card_is_left_alone_when_the_supervisor_asks_for_it(start: Start) -> None:
    probe = start()
    probe.card(UUIDS[1], lambda c: not c["error"])

    probe.child.channel.send({"t": "leave", "uuid": UUIDS[1], "seconds": 0.3})

    assert not probe.card(UUIDS[1], lambda c: c["error"])["lost"]
    probe.card(UUIDS[1], lambda c: not c["error"])


@pytest.mark.parametrize(
    ("line", "code"),
    [("fail nvmlInit LIB_RM_VERSION_MISMATCH", 18), ("fail nvmlInit DRIVER_NOT_LOADED", 9)],
    ids=["mismatch", "no driver"],
)
def test_a_driver_that_cannot_be_used_is_told_once_with_its_number(
    start: Start, cards: FakeCards, line: str, code: int
) -> None:
    cards.say(line)
    probe = start()

    assert probe.wait_for("no_nvml")["code"] == code
    probe.until(lambda: sum(m["t"] == "readings" for m in probe.messages) >= 3)
    assert all(m["cards"] == [] for m in probe.messages if m["t"] == "readings")
    assert sum(m["t"] == "no_nvml" for m in probe.messages) == 1


def test_a_driver_that_is_loaded_later_is_found(start: Start, cards: FakeCards) -> None:
    cards.say("fail nvmlInit DRIVER_NOT_LOADED")
    probe = start(reopen_s=0.2)
    probe.wait_for("no_nvml")

    cards.say("fail nvmlInit off")

    probe.wait_for("up")
    assert probe.card(UUIDS[0])["temperature_c"] == 41


def test_nvml_is_opened_anew_while_a_card_is_missing_and_events_are_heard_afterwards(start: Start, cards: FakeCards) -> None:
    cards.say(f"gpu {UUIDS[0]} state=gone")
    probe = start(reopen_s=0.5)

    probe.until(lambda: sum(m["t"] == "up" for m in probe.messages) >= 3)
    cards.say(f"gpu {UUIDS[0]} state=ok")
    probe.card(UUIDS[0], lambda c: not c["error"])

    hear(probe, cards, UUIDS[0], 94)
    assert not any("hang" in line for line in probe.lines)


def test_a_failing_wait_for_events_is_tried_again(start: Start, cards: FakeCards) -> None:
    cards.say("fail nvmlEventSetWait UNKNOWN")
    probe = start()
    probe.until(lambda: any("xid_events_interrupted" in line for line in probe.lines))
    assert probe.card(UUIDS[0])["error"] is None

    cards.say("fail nvmlEventSetWait off")

    hear(probe, cards, UUIDS[0], 94)


def test_without_the_library_the_probe_says_so_and_stays(start: Start) -> None:
    probe = start(environment={"LD_LIBRARY_PATH": ""})

    if probe.until(lambda: next((m for m in probe.messages if m["t"] in ("no_nvml", "up")), None))["t"] == "up":
        pytest.skip("this host has a real NVML")
    assert probe.wait_for("no_nvml")["code"] == 12
    probe.until(lambda: sum(m["t"] == "readings" for m in probe.messages) >= 2)
    assert not probe.ended


def test_the_kernel_log_tells_of_the_pools_cards_only_and_of_the_process(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    writer = os.open(log, os.O_RDWR)  # keeps it open from both sides
    probe = start(kernel_log=True, kernel_log_path=str(log))
    assert probe.wait_for("up")["kernel_log"]
    probe.card(UUIDS[0])

    os.write(writer, b"4,1,1,-;usb 1-1: new device\n SUBSYSTEM=usb\n")
    os.write(writer, b"4,2,1,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n")  # nobody of ours
    os.write(writer, b"4,3,1,-;NVRM: Xid (PCI:0000:18:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault\n DEVICE=+pci\n")
    os.write(
        writer, b"4,4,1,-;NVRM: The NVIDIA GPU 0000:9b:00.0 (PCI ID: 10de:2335)\\x0ainstalled in this system has fallen off the"
    )
    os.write(writer, b" bus and is not responding to commands.\n")
    probe.wait_for("xid", xid=79)
    os.close(writer)

    told = [(m["uuid"], m["xid"], m["source"], m["pid"]) for m in probe.messages if m["t"] == "xid"]
    assert told == [(UUIDS[1], 31, "kernel", 4711), (UUIDS[0], 79, "kernel", None)]


def test_a_kernel_log_that_cannot_be_read_is_no_reason_to_stop(start: Start, tmp_path: Path) -> None:
    probe = start(kernel_log=True, kernel_log_path=str(tmp_path / "none"))

    assert probe.wait_for("up")["kernel_log"] is False
    probe.card(UUIDS[0])


def test_it_ends_when_told_to_and_when_the_supervisor_is_gone(start: Start) -> None:
    told, orphan = start(), start()
    for probe in (told, orphan):
        probe.card(UUIDS[0])

    told.child.channel.send({"t": "stop"})
    told.until(lambda: told.ended)
    assert told.child.code == 0
    orphan.child.ignore_channel()
    orphan.child.channel.close()
    orphan.until(lambda: orphan.ended)
    assert orphan.child.code == 0


def test_xids_wait_for_a_supervisor_that_does_not_read_and_readings_do_not() -> None:
    ours, theirs = Channel.pair()
    speaker = Speaker(Channel(theirs))
    reading = {"t": "readings", "cards": ["x" * 20_000]}
    for _ in range(100):  # more than the socket holds
        speaker.say(reading, keep=False)
    for xid in range(300):
        speaker.say({"t": "xid", "xid": xid})

    def drain() -> list[dict[str, Any]]:
        return list(iter(ours.receive, None))

    assert {m["t"] for m in drain()} == {"readings"}
    speaker.say({"t": "xid", "xid": 300})
    assert [m["xid"] for m in drain()] == list(range(45, 301))  # the latest 256, in order
    ours.close()
    theirs.close()


def test_sixteen_cards_fit_one_message_many_times_over(start: Start, cards: FakeCards) -> None:
    import msgpack

    many = [f"GPU-{n:08x}-aaaa-bbbb-cccc-000000000000" for n in range(16)]
    for n, uuid in enumerate(many):
        cards.say(f'gpu {uuid} name="{"x" * 90}" bus=0000:{n + 1:02x}:00.0')
    cards.say("fail nvmlDeviceGetMemoryInfo UNKNOWN")

    message = start(many).wait_for("readings")

    assert len(message["cards"]) == 16
    assert len(msgpack.packb(message)) * 8 < MAX_MESSAGE_BYTES


def test_what_the_probe_says_leads_card_health_to_its_verdicts(start: Start, cards: FakeCards) -> None:
    health = CardHealth(UUIDS, boot_id="b", wall_offset_s=0.0, now=0.0)
    cards.say(f"gpu {UUIDS[0]} state=lost")
    cards.say(f"gpu {UUIDS[3]} recovery=1")

    message = start().wait_for("readings")
    verdicts = health.readings([r for c in message["cards"] if (r := reading_from(c))], 1.0)

    assert [(type(v), v.uuid) for v in verdicts] == [(Lose, UUIDS[0]), (Quarantine, UUIDS[3])]
