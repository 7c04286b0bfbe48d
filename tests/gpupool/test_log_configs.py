"""The configurations for log collectors: well formed, and about the fields and defaults that the pool has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.log_events import ROOT
from support.log_lines import Line

FLUENTD = sorted((ROOT / "configs" / "fluentd").glob("*.conf"))


def test_there_is_one_for_each_way() -> None:
    assert {path.stem for path in FLUENTD} == {"journald", "tail", "forward"}


@pytest.mark.parametrize("path", FLUENTD, ids=lambda path: path.stem)
def test_sections_are_balanced_and_hold_parameters(path: Path) -> None:
    open_: list[str] = []
    for raw in path.read_text().splitlines():
        line = raw.strip()
        if closing := re.fullmatch(r"</(\w+)>", line):
            assert open_.pop() == closing[1], line
        elif opening := re.fullmatch(r"<(\w+)( [\w.*]+)?>", line):
            open_.append(opening[1])
        elif line and not line.startswith("#"):
            assert open_, line
            name, _, value = line.partition(" ")
            assert re.fullmatch(r"@?[a-z_]+", name), line
            assert value, line
            if value[0] in "[{":
                json.loads(value)
    assert not open_


@pytest.mark.parametrize("path", FLUENTD, ids=lambda path: path.stem)
def test_each_source_has_a_type_and_its_tag_is_matched(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"<source>\n  @type \w+\n", text)
    tag = found[1] if (found := re.search(r"^  tag (\S+)$", text, re.MULTILINE)) else "gpupool.router"
    pattern = re.findall(r"<match (\S+)>", text)[-1]
    assert re.fullmatch(pattern.replace(".**", r"(\..+)?"), tag)


@pytest.mark.parametrize("name", ["journald", "tail"])
def test_the_time_is_taken_from_the_field_that_lines_have(name: str) -> None:
    key = re.search(r"time_key (\w+)\n\s+time_type float", (ROOT / "configs" / "fluentd" / f"{name}.conf").read_text())
    assert key
    assert Line.model_fields[key[1]].annotation is float


def test_logrotate_takes_its_configuration(tmp_path: Path) -> None:
    path = ROOT / "configs" / "logrotate" / "gpupool"
    assert not re.search(r"^\s*copytruncate", path.read_text(), re.MULTILINE)
    if not (program := shutil.which("logrotate", path="/usr/sbin:/usr/bin:/sbin:/bin")):
        pytest.skip("logrotate is not installed")
    command = [program, "--debug", "--state", str(tmp_path / "state"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:") and "unknown" not in line]
    assert not errors  # but for our user and group, which need not exist here
