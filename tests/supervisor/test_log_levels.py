"""Log levels that were asked for: who gets which, and for how long."""

from __future__ import annotations

from gpupool.supervisor.log_levels import LogLevels


def test_each_component_logs_as_configured_until_asked_otherwise() -> None:
    levels = LogLevels("info")
    levels.ask("router", "debug", 10.0, 5.0)

    assert [levels.of(c) for c in ("supervisor", "router", "worker", 0)] == ["info", "debug", "info", "info"]


def test_one_worker_goes_before_all_workers() -> None:
    levels = LogLevels("info")
    levels.ask("worker", "warning", 10.0, 0.0)
    levels.ask(1, "debug", 10.0, 0.0)

    assert (levels.of(0), levels.of(1)) == ("warning", "debug")


def test_a_wish_ends_by_itself_and_zero_stays() -> None:
    levels = LogLevels("info")
    levels.ask("router", "debug", 10.0, 5.0)
    levels.ask(0, "error", 10.0, 0.0)

    assert levels.expire(14.9) == []
    assert levels.expire(15.0) == ["router"]
    assert levels.expire(1e9) == []
    assert (levels.of("router"), levels.of(0)) == ("info", "error")


def test_default_takes_a_wish_back_and_a_reload_keeps_the_others() -> None:
    levels = LogLevels("info")
    levels.ask("router", "debug", 10.0, 0.0)
    levels.ask("worker", "debug", 10.0, 0.0)
    levels.ask("router", "default", 11.0, 0.0)
    levels.configured = "warning"

    assert (levels.of("router"), levels.of("worker")) == ("warning", "debug")


def test_the_document_tells_what_holds_and_for_how_long() -> None:
    levels = LogLevels("info")
    levels.ask("router", "debug", 10.0, 5.0)
    levels.ask(3, "error", 10.0, 0.0)

    document = levels.document(12.0)

    assert document["levels"] == {"supervisor": "info", "router": "debug", "worker": "info"}
    assert document["asked"] == [
        {"component": "router", "level": "debug", "for_s": 3.0},
        {"component": "worker 3", "level": "error", "for_s": None},
    ]
