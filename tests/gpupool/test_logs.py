"""One call sets up a process's log; all that is said ends in lines of one form."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

from gpupool.logs import render_text


def run(code: str, options: str = "", **spec: Any) -> list[dict[str, Any]]:
    """Run code in a process whose log is its stderr; return the records."""
    head = f"from gpupool.logs import configure\nfrom gpupool.spec import LogSpec\nlog = configure('router', LogSpec(**{spec!r}), worker=3{options})\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=False
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_each_line_has_its_fixed_fields() -> None:
    (record,) = run("log.event.info('hello', count=2)")
    assert isinstance(record["time"], float)
    assert record["timestamp"].endswith("+00:00")
    assert (record["level"], record["event"], record["component"], record["worker"], record["count"]) == (
        "info",
        "hello",
        "router",
        3,
        2,
    )
    assert record["pid"] > 0


def test_the_level_can_be_changed_at_run_time() -> None:
    records = run(
        "log.event.debug('a'); log.set_level(10); log.event.debug('b'); log.set_level(40); log.event.warning('c'); log.request({'code': 'ok'})"
    )
    assert [r["event"] for r in records] == ["b"]


def test_uncaught_errors_in_main_and_in_threads_become_one_line_each() -> None:
    records = run(
        """
        import threading
        t = threading.Thread(target=lambda: 1 / 0, name="side")
        t.start(); t.join()
        raise ValueError("with\\nnewline")
        """
    )
    assert [(r["event"], r["thread"]) for r in records] == [("uncaught_exception", "side"), ("uncaught_exception", "main")]
    assert "ZeroDivisionError" in records[0]["traceback"]
    assert records[1]["error"] == "ValueError: with\nnewline"


def test_of_a_models_errors_types_and_places_are_told_and_no_word() -> None:
    records = run(
        """
        import threading
        def with_cause():
            try:
                int("MARKER")
            except ValueError as e:
                raise KeyError("MARK" + "ER") from e
        class Odd:
            def __del__(self):
                raise RuntimeError("MARK" + "ER")
        t = threading.Thread(target=with_cause, name="side")
        t.start(); t.join()
        Odd()
        ring = ValueError("MARK" + "ER"); ring.__context__ = OSError(); ring.__context__.__context__ = ring
        raise ring
        """,
        options=", words=False",
    )
    assert [r["error"] for r in records] == ["KeyError", "RuntimeError", "ValueError"]
    assert "MARKER" not in str([{**r, "traceback": r["traceback"].replace('int("MARKER")', "")} for r in records])
    assert records[0]["traceback"].index("ValueError") < records[0]["traceback"].index("in with_cause\n", 80)


def test_libraries_and_warnings_end_in_the_same_lines() -> None:
    records = run(
        """
        import logging, warnings
        logging.getLogger("some.library").error("count %d", 5)
        logging.getLogger("some.library").error("bad format %d", "x")
        warnings.warn("old")
        try:
            1 / 0
        except ZeroDivisionError:
            log.event.exception("failed")
        """
    )
    assert [r["event"] for r in records] == ["library_log", "library_log", "library_log", "failed"]
    assert records[0]["message"] == "count 5"
    assert records[0]["source"] == "some.library"
    assert "ZeroDivisionError" in records[3]["traceback"]


def test_request_lines_carry_what_they_are_given() -> None:
    (record,) = run("log.request({'request_id': 'r1', 'code': 'ok', 'total_ms': 1.5})")
    assert (record["event"], record["request_id"], record["code"], record["total_ms"]) == ("request", "r1", "ok", 1.5)


def test_a_log_for_people_survives_what_cannot_be_put_into_words() -> None:
    code = """
        class Mute:
            def __str__(self): raise RuntimeError("no")
            __repr__ = __str__
        log.event.info("odd", value=Mute())
        log.event.info("after")
    """
    head = "from gpupool.logs import configure\nfrom gpupool.spec import LogSpec\nlog = configure('router', LogSpec(format='console'))\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=False
    )
    assert [line.split()[3] for line in done.stderr.splitlines()] == ["odd", "after"]


def test_a_line_for_people_commands_no_terminal_and_is_bounded() -> None:
    record = {
        "time": 1.0,
        "timestamp": "2026-01-01T00:00:00.000000+00:00",
        "level": "info",
        "component": "router",
        "event": "request",
    }
    line = render_text({**record, "request_id": "\x1b]0;own\x07\n12:00:00 error forged", "traceback": "a\n\x1b[2Jb"}).decode()
    assert "\x1b" not in line
    assert line.splitlines()[0].endswith("forged")
    assert line.splitlines()[1:] == ["a", "\\x1b[2Jb"]
    assert len(render_text({**record, "message": "x" * 1_000_000})) < 5000
