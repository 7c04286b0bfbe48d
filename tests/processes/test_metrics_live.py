"""The metrics page of a live pool: as documented, by promtool's rules, and in order while processes die, hang and readers hang up."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.running import FAST, RunningPool

pytestmark = pytest.mark.processes
DOCUMENT = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
#: Workers may die as often as they like, and come back at once.
CONFIG = FAST.replace("restart_delays_s = [0.0, 0.5, 1.0]", "restart_delays_s = [0.0]\nmax_restarts = 1000")
MakePool = Callable[..., RunningPool]


def scrape(pool: RunningPool) -> str:
    """The page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{pool.http}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def values(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The samples of that name, by the values of their labels."""
    families = text_string_to_metric_families(text)
    return {tuple(s.labels.values()): s.value for f in families for s in f.samples if s.name == f"gpupool_{name}"}


def series(text: str) -> set[str]:
    """Names and labels of all samples, but for what one batch more or less decides: why batches closed, and whether speed is known."""
    by_chance = ("#", "gpupool_batch_close_total", "gpupool_sample_seconds")
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith(by_chance)}


def answered(pool: RunningPool) -> float:
    """Requests answered ok; a router that is busy may tell them a second later."""
    return values(scrape(pool), "requests_total")["toy", "ok"]


@pytest.fixture
def pool(make_pool: MakePool) -> RunningPool:
    """A pool that has answered ten requests, and refused ten for no model of ours, and whose workers have told of the batches."""
    pool = make_pool(config=CONFIG).start()
    with pool.client() as client:
        for n in range(10):
            client.call({"i": n})
            client.call({"i": n}, model=f"stranger-{n}")
    pool.wait(lambda _: answered(pool) == 10 and sum(values(scrape(pool), "batches_total").values()) == 10)
    return pool


def test_the_page_is_as_documented_and_holds_no_word_of_a_client(pool: RunningPool) -> None:
    text = scrape(pool)
    found = {f"{f.name}_total" if f.type == "counter" else f.name: f.type for f in text_string_to_metric_families(text)}
    assert found == dict(re.findall(r"^\| `(gpupool_\w+)` \| (\w+) \|", DOCUMENT, re.MULTILINE))
    answered = {labels: count for labels, count in values(text, "requests_total").items() if count}
    assert answered == {("toy", "ok"): 10, ("", "unknown_model"): 10}
    assert "stranger" not in text
    durations = values(text, "stage_duration_seconds_count")
    assert durations == {("toy", s): 10 for s in ("pending", "queue", "preprocess", "forward", "postprocess", "total")}
    assert sum(values(text, "samples_total").values()) == 10

    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's package prometheus) is not there: the names were not checked by it")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_deaths_of_workers_and_of_the_router_change_no_series_and_set_no_counter_back(pool: RunningPool) -> None:
    before = scrape(pool)
    for incarnation in (2, 3, 4):
        os.kill(pool.worker(0)["pid"], signal.SIGKILL)
        pool.wait_for_incarnation(0, incarnation)
    os.kill(pool.status()["router"]["pid"], signal.SIGKILL)
    pool.wait(lambda s: s["router"]["restarts"] == 1 and s["pool"]["workers_ready"] == 2)
    after = scrape(pool)

    for name in (
        "requests_total",
        "request_duration_seconds_bucket",
        "batches_total",
        "batch_close_total",
        "batch_size_bucket",
    ):
        old, new = values(before, name), values(after, name)
        assert all(new[labels] >= value for labels, value in old.items()), name
    assert values(after, "worker_restarts_total")["0", "crash"] == 3
    with pool.client() as client:
        client.call({"i": 11})
    pool.wait(lambda _: answered(pool) == 11)
    pool.wait(lambda _: sum(values(scrape(pool), "batches_total").values()) == 11)
    pool.wait(lambda _: series(scrape(pool)) == series(before))


def test_a_hung_worker_a_hung_router_and_readers_that_hang_up_do_not_stop_it(pool: RunningPool) -> None:
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", pool.http), timeout=5) as reader:
            reader.sendall(b"GET /metrics HTTP/1.1\r\n\r\n"[: 10 if _ % 2 else None])
    worker, router = pool.worker(1)["pid"], pool.status()["router"]["pid"]
    os.kill(worker, signal.SIGSTOP)
    pool.wait(lambda _: values(scrape(pool), "worker_late") == {("0",): 0, ("1",): 1})
    os.kill(router, signal.SIGSTOP)
    assert answered(pool) == 10
    for pid in (worker, router):  # by now they may have been replaced
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
