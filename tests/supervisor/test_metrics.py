"""The metrics page of a pool that has everything: complete, as documented, and as large after 200 restarts as before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpupool.stages import STAGES
from gpupool.supervisor.exposition import Histogram, family, histogram
from gpupool.supervisor.metrics import page
from support.full_page import full

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
ROW = re.compile(r"^\| `(gpupool_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric by the document."""
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(DOCUMENT.read_text())}


def shown(text: str) -> dict[str, tuple[str, set[str]]]:
    """The same by a page; labels of histograms without `le`."""
    found = {}
    for each in text_string_to_metric_families(text):
        name = f"{each.name}_total" if each.type == "counter" else each.name
        labels = {label for sample in each.samples for label in sample.labels if label != "le"}
        found[name] = (each.type, labels)
    return found


def test_the_page_of_a_pool_with_everything_is_the_documents() -> None:
    assert shown(page(*full(2, 2))) == documented()


def test_every_metric_has_a_value_where_everything_is_there() -> None:
    empty = [each.name for each in text_string_to_metric_families(page(*full(2, 2))) if not each.samples]
    assert not empty


def test_restarts_leave_the_page_as_large_as_it_was() -> None:
    before, after = page(*full(4, 3)), page(*full(4, 3, incarnations=201))

    def series(text: str) -> list[str]:
        return [line.rpartition(" ")[0] for line in text.splitlines()]

    assert series(after) == series(before)
    assert 'gpupool_worker_restarts_total{worker="3",reason="crash"} 200\n' in after
    assert len(after) < 1.1 * len(before)  # counts have more digits


def test_no_counter_goes_back_from_one_incarnation_to_the_next() -> None:
    def counters(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for each in text_string_to_metric_families(text)
            if each.type in ("counter", "histogram")
            for sample in each.samples
        }

    before, after = counters(page(*full(2, 2))), counters(page(*full(2, 2, incarnations=2)))
    assert before.keys() == after.keys()
    assert all(after[key] >= value for key, value in before.items())
    key = ("gpupool_requests_total", (("code", "ok"), ("model", "model-1")))
    assert (before[key], after[key]) == (1_000_000, 2_000_000)


def test_a_pool_that_has_done_nothing_yet_shows_its_models_and_no_guesses() -> None:
    status, counts = full(1, 1)
    status["router"] = {"pending": 0, "restarts": 0}
    worker = status["workers"][0] | {"heartbeat_age_ms": None, "service_ms": None, "memory": {}, "leak": {}}
    worker["device"] = {"id": "cpu:0", "health": "ok"}
    status["workers"] = [worker]
    counts = type(counts)({}, ("crash",), {}, {}, {}, {}, None, 0.0)

    text = page(status, counts)

    assert 'gpupool_requests_total{model="model-0",code="ok"} 0\n' in text
    assert 'gpupool_worker_restarts_total{worker="0",reason="crash"} 0\n' in text
    names = set(re.findall(r"^(gpupool_\w+)[{ ]", text, re.MULTILINE))
    absent = {"gpupool_heartbeat_age_seconds", "gpupool_sample_seconds", "gpupool_retry_budget_ratio", "gpupool_log_forward_up"}
    assert not names & absent
    assert not any(name.startswith(("gpupool_memory", "gpupool_device_t", "gpupool_device_m")) for name in names)
    assert shown(text).keys() == documented().keys()


def test_labels_are_escaped_and_integers_written_in_full() -> None:
    text = family("m", "counter", "Help", [({"a": 'x"\\\n'}, 12345678901234567890), ({"a": "none"}, None)])
    assert text == '# HELP m Help\n# TYPE m counter\nm{a="x\\"\\\\\\n"} 12345678901234567890\n'


def test_buckets_are_cumulative_and_end_at_infinity() -> None:
    text = histogram("h", "Help", (0.5, 1.0), [Histogram({"a": "b"}, (1, 2, 3), 4.5)])
    assert text.splitlines()[2:] == [
        'h_bucket{a="b",le="0.5"} 1', 'h_bucket{a="b",le="1.0"} 3', 'h_bucket{a="b",le="+Inf"} 6', 'h_sum{a="b"} 4.5', 'h_count{a="b"} 6',
    ]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_stands_in_the_document(stage: str) -> None:
    assert f"`{stage}`" in DOCUMENT.read_text()
