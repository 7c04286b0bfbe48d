"""A real Prometheus for a test: its own folder and port, the project's rules, and time that runs faster."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final, Self

import pytest

from support.running import free_port, until

CONFIGS: Final = Path(__file__).parents[2] / "configs"
RULES: Final = CONFIGS / "prometheus" / "gpupool.rules.yml"
#: A test cannot wait for five minutes. Each window, offset and `for` of the rules, and what it becomes.
FASTER: Final = {
    "7d:10m": "30s:1s",
    "1h": "2s",
    "30m": "10s",
    "15m": "10s",
    "10m": "1s",
    "5m": "4s",
    "2m": "1s",
    "1m": "2s",
    "30s": "1s",
}


def found(program: str) -> str:
    """A program of the apt package `prometheus`; skips the test where it is missing."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is missing (apt-get install prometheus)")
    return path


def faster(rules: str) -> str:
    """The rules with every duration replaced by a shorter one; one that is not in the table is an error here."""
    windows = re.sub(r"\[([\dsmhd:]+)\]", lambda m: f"[{FASTER[m[1]]}]", rules)
    offsets = re.sub(r"\boffset (\w+)", lambda m: f"offset {FASTER[m[1]]}", windows)
    return re.sub(r"(?m)^(\s+for:) (\w+)$", lambda m: f"{m[1]} {FASTER[m[2]]}", offsets)


class RunningPrometheus:
    """It scrapes its pools twice a second and evaluates the faster rules as often. `target` is the first, as HOST:PORT."""

    def __init__(self, folder: Path, target: str, *others: str) -> None:
        self.folder, self.target = folder, target
        self.address = f"http://127.0.0.1:{free_port()}"
        (folder / RULES.name).write_text(faster(RULES.read_text()))
        config = (CONFIGS / "prometheus" / "prometheus.yml").read_text()
        (folder / "prometheus.yml").write_text(
            config.replace("15s", "500ms").replace("127.0.0.1:9555", '", "'.join((target, *others)))
        )
        command = [found("prometheus"), "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--web.listen-address={self.address[7:]}"], cwd=folder, stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def wait_until_up(self, within: float = 30.0) -> None:
        """Wait until it has scraped its target."""
        for _ in until(within):
            assert self._process.poll() is None, (self.folder / "log").read_text()
            with contextlib.suppress(OSError):
                if self.query('up{job="gpupool"} == 1'):
                    return
        raise AssertionError(f"no scrape of {self.target} within {within} s: {(self.folder / 'log').read_text()}")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression is now; fails with Prometheus' own words when it is wrong."""
        result: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return result

    def firing(self, alert: str) -> list[dict[str, Any]]:
        """The alerts of this name that fire now."""
        alerts = self._get("alerts")["alerts"]
        return [a for a in alerts if a["labels"]["alertname"] == alert and a["state"] == "firing"]

    def all_firing(self) -> set[str]:
        """The names of all alerts that fire now."""
        return {a["labels"]["alertname"] for a in self._get("alerts")["alerts"] if a["state"] == "firing"}

    def _get(self, what: str, **arguments: str) -> dict[str, Any]:
        url = f"{self.address}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from None
