"""The lines of `top`: they fit, whatever the figures."""

from __future__ import annotations

import dataclasses

import pytest

from gpupool.cli.rates import Row
from gpupool.cli.top_lines import event_line, heading, number, size, worker_line

ROW = Row(
    worker=1, state="ready", card="cpu:1", health="ok", utilization=None, memory_bytes=None, temperature_c=None, queue=0, running=0,
    batch=None, rows_per_s=None, sample_ms=None, restarts=0, beat_ms=None, late=False,
)  # fmt: skip
LARGE = Row(
    worker=63, state="backing_off", card="GPU-5ea1b2c3-1111", health="degraded", utilization=1.0, memory_bytes=141 << 30,
    temperature_c=104.6, queue=9999, running=999, batch=1234.56, rows_per_s=123456.7, sample_ms=9999.99, restarts=999, beat_ms=7.2e6, late=True,
)  # fmt: skip


@pytest.mark.parametrize("row", [ROW, LARGE], ids=["little", "much"])
def test_a_worker_is_as_wide_as_the_heading_and_fits_80_columns_with_a_scroll_bar(row: Row) -> None:
    assert len(worker_line(row)) == len(heading()) <= 78


def test_each_figure_stands_under_its_heading() -> None:
    words = dict(zip(heading().split(), worker_line(LARGE).split(), strict=True))

    assert words == {
        "#": "63", "state": "backing…", "card": "5ea1b…", "health": "degra…", "util": "100%", "mem": "141G", "°C": "105", "wait": "9999",
        "run": "999", "batch": "1235", "rows/s": "123k", "ms/row": "10000", "rst": "999", "beat": "999s",
    }  # fmt: skip


def test_a_ready_worker_whose_beat_is_missing_is_late() -> None:
    assert worker_line(dataclasses.replace(ROW, late=True)).split()[1] == "late"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.123, "0.12"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (99_999.4, "99999"),
        (1e7, "10M"),
    ],
)
def test_numbers(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0M"), (999 << 20, "999M"), (1000 << 20, "1.0G"), (80 << 30, "80.0G"), (100 << 30, "100G")]
)
def test_sizes(value: int, shown: str) -> None:
    assert size(value) == shown


def test_an_event_is_one_line_with_what_matters() -> None:
    event = {"time": 0, "level": "warning", "event": "worker_late", "worker": 3, "pid": 7, "cause": "a\nb", "seconds": 2.5}
    line = event_line(event)

    assert line[8:] == " WARNING worker 3 worker_late cause=a b seconds=2.5"
    assert event_line({}) == "--:--:-- ?"
