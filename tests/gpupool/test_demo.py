"""The demo: its arithmetic, its messages, and the whole of it with a real pool and the real model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpupool import demo, demo_report
from gpupool.cli.output import Failure
from gpupool.client import Reply
from gpupool.manifest import read_manifest
from gpupool.temporary_pool import Place, TemporaryPool

GPUPOOL = [sys.executable, "-P", "-m", "gpupool"]
needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in demo._NEEDS), reason="needs torch and the model's weights"
)


def reply(worker: int, total: float, **timings: float) -> Reply:
    return Reply("id", None, worker=worker, timings_ms={"total": total, **timings})


def test_text_in_the_package_is_a_real_one() -> None:
    paragraphs = demo.read_paragraphs(None)
    assert len(paragraphs) >= 150
    assert len(set(paragraphs)) == len(paragraphs)
    assert min(map(len, paragraphs)) > 40


def test_model_directory_in_the_package_is_complete() -> None:
    assert read_manifest(demo.model_directory()).name == "minilm"


def test_paragraphs_are_joined_lines_between_empty_ones(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("\n\none\n two \n\n\n  \nthree\n")
    assert demo.read_paragraphs(file) == ["one two", "three"]


def test_text_without_empty_lines_is_taken_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("one\ntwo\nthree")
    assert demo.read_paragraphs(file) == ["one", "two", "three"]


@pytest.mark.parametrize("content", [b"", b" \n\n \n", b"\xff\xfe\x00", None])
def test_file_without_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(Failure) as caught:
        demo.read_paragraphs(file)
    assert caught.value.exit_code == 2
    assert str(file) in caught.value.message


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in {"torch", "numpy"} else object())
    with pytest.raises(Failure) as caught:
        demo.run_demo(None)
    assert caught.value.message == "the demo needs torch, numpy; install with: pip install 'gpupool[gpu]'"


def test_percentile_is_the_nearest_rank() -> None:
    ordered = [float(n) for n in range(1, 11)]
    assert [demo_report.percentile(ordered, p) for p in (0, 50, 51, 95, 100)] == [1, 5, 6, 10, 10]
    assert demo_report.percentile([3.0], 99) == 3


def test_batches_are_counted_from_request_lines() -> None:
    lines: list[dict[str, Any]] = [{"event": "request", "batch_size": size} for size in [4] * 8 + [1, 1, 3, 3, 3, 0]]
    lines += [{"event": "batch", "batch_size": 7}, {"event": "request"}, {}]
    assert demo_report.batch_sizes(lines) == {4: 2, 1: 2, 3: 1}


def test_report_sums_up_what_the_replies_say() -> None:
    replies = [reply(0, 10.0, forward=4.0), reply(1, 20.0, forward=6.0), reply(0, 30.0), reply(0, 40.0)]
    report = demo_report.make_report(replies, 2.0, {2: 1, 1: 2})
    assert report["requests_per_s"] == 2.0
    assert report["latency_ms"] == {"p50": 20.0, "p95": 40.0, "p99": 40.0}
    assert report["batch"] == {"mean": 1.33, "sizes": {"1": 2, "2": 1}}
    assert report["workers"] == {"0": 3, "1": 1}
    assert report["stages_ms"] == {"forward": 2.5}


def test_configuration_of_the_demo_survives_odd_paths() -> None:
    import tomllib

    odd = Path('/tmp/a "b" \\ ü')
    document = tomllib.loads(demo.demo_config(Place(str(odd), "tcp://127.0.0.1:1", str(odd / "log")), '"cpu:3"'))
    assert document["pool"]["runtime_dir"] == str(odd)
    assert document["pool"]["devices"] == "cpu:3"


def demo_command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(
        [*GPUPOOL, "demo", *arguments], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )


def left_over(folder: Path) -> list[str]:
    """Command lines of live processes that belong to a demo in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets in it, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="gp-", dir="/tmp") as name:
        yield Path(name)


def test_a_folder_that_is_too_deep_for_sockets_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = folder / ("x" * 90)
    deep.mkdir()
    for where, taken in ((folder, folder), (deep, Path("/tmp"))):
        monkeypatch.setattr(tempfile, "tempdir", str(where))
        pool = TemporaryPool(lambda place: place.runtime_dir)
        assert Path(pool._folder.name).parent == taken
        pool._folder.cleanup()
    assert list(deep.iterdir()) == []


@needs_model
@pytest.mark.processes
def test_demo_finds_the_paragraph_that_means_the_same(folder: Path) -> None:
    process = demo_command(folder, "--json", "--workers", "2")
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["texts"] == result["requests"] == sum(result["workers"].values())
    assert result["requests_per_s"] > 0
    assert result["batch"]["mean"] > 1
    best = {search["question"]: search["hits"][0]["text"] for search in result["searches"]}
    assert "fallen off the bus" in best["A GPU disappeared from the host. What now?"]
    assert "Stopping a service well" in best["Stopping the service without losing anybody's request"]
    assert left_over(folder) == []
    assert list(folder.iterdir()) == []


@needs_model
@pytest.mark.processes
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_interrupted_demo_leaves_nothing_running(folder: Path, signum: signal.Signals) -> None:
    process = demo_command(folder, "--json", "--workers", "1")
    end = time.monotonic() + 60
    while not any("gpupool.worker" in line for line in left_over(folder)):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == (-9 if signum == signal.SIGKILL else 130)
    end = time.monotonic() + 30
    while left_over(folder):
        assert time.monotonic() < end, left_over(folder)
        time.sleep(0.05)
