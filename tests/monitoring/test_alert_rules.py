"""The alert rules: promtool's verdict, and that each alert is tried and has its section in the runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from demonstrations.diagnosis import DRILLS
from gpupool.cli.app import app
from support.panels import ALERTS, DASHBOARD
from support.prometheus import CONFIGS, RULES, faster, found

RUNBOOK = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
TESTS: list[dict[str, Any]] = yaml.safe_load((RULES.parent / "gpupool.rules.test.yml").read_text())["tests"]
#: What REQUIREMENTS asks for by name.
REQUIRED = {"GpupoolGpuIdle", "GpupoolQueueLong", "GpupoolDeviceMemoryHigh", "GpupoolLatencyHigh", "GpupoolErrorRateHigh"}


def sections() -> dict[str, str]:
    """The runbook's sections of single alerts, by heading."""
    parts = re.split(r"(?m)^### (.+)$", RUNBOOK)
    return {name: re.split(r"(?m)^## ", text)[0] for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "gpupool.rules.test.yml")])
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    check_by_promtool(RULES.parent, *arguments)


def check_by_promtool(folder: Path, *arguments: str) -> None:
    done = subprocess.run([found("promtool"), *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_hold_where_targets_have_labels_of_their_own(tmp_path: Path) -> None:
    """The same tests with `env="prod"` on every series, as a site's scrape configuration may add; aggregations may drop it."""
    rules = yaml.safe_load((RULES.parent / "gpupool.rules.test.yml").read_text())
    for test in rules["tests"]:
        for series in test["input_series"]:
            series["series"] = re.sub(r"\}$", ',env="prod"}', series["series"])
        for check in test["alert_rule_test"]:
            for alert in check.get("exp_alerts", []):
                if not re.search(
                    r"\bby \(|instance:|instance_worker:gpupool_(batch|worker)|instance_model:gpupool_request_errors",
                    left(check),
                ):
                    alert["exp_labels"]["env"] = "prod"
    (tmp_path / RULES.name).write_text(RULES.read_text())
    (tmp_path / "test.yml").write_text(yaml.safe_dump(rules))
    check_by_promtool(tmp_path, "test", "rules", "test.yml")


def left(check: dict[str, Any]) -> str:
    """What the alert of a check takes its labels from."""
    return re.split(r"\b(?:and|unless)\b", str(ALERTS[check["alertname"]]["expr"]))[0]


def test_every_alert_is_tried_firing_and_quiet() -> None:
    checks = [check for test in TESTS for check in test["alert_rule_test"]]
    fired = {c["alertname"] for c in checks if c.get("exp_alerts")}
    quiet = {c["alertname"] for c in checks if not c.get("exp_alerts")}
    assert fired == ALERTS.keys()
    assert quiet == ALERTS.keys()


def test_the_required_alerts_are_there() -> None:
    assert ALERTS.keys() >= REQUIRED


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_what_is_wrong_and_where_to_read_on(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert "{{ $labels.instance }}" in alert["annotations"]["summary"]
    assert alert["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"


def test_the_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    assert sections().keys() == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_a_section_says_what_to_look_at_and_when_it_is_over(name: str) -> None:
    text = sections()[name]
    assert "- Look" in text
    assert re.search(r"- (Back to sleep|Over:|Nobody's night|Nothing to do)|`gpupool (resume|drain)", text)


def test_links_within_the_runbook_lead_somewhere() -> None:
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"(?m)^##+ (.+)$", RUNBOOK)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", RUNBOOK)) <= headings


def test_panels_that_the_runbook_names_are_on_the_dashboard() -> None:
    titles = {p["title"] for p in DASHBOARD["panels"]}
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", RUNBOOK))
    assert len(named) > 10
    assert {n for n in named if not any(title.startswith(n) for title in titles)} == set()


def test_every_command_that_the_runbook_names_exists_with_its_options() -> None:
    """Read from the program's own table of commands."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = {tuple(text.split()[1:]) for text in code() if re.match(r"gpupool [a-z]", text)}
    assert len(named) > 20
    assert {command for command, *_ in named} - commands.keys() == set()
    for command, *arguments in named:
        options = {option for p in commands[command].params for option in p.opts}
        assert {a for a in arguments if a.startswith("-")} <= options, (command, arguments)


def code() -> list[str]:
    """Everything in the runbook that is set as code."""
    blocks = re.findall(r"(?ms)^```\w*\n(.*?)^```", RUNBOOK)
    lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", RUNBOOK))


def test_the_ten_faults_are_those_that_the_demonstration_shows() -> None:
    """A row for each of a fault's commands, the first with its name, alert and panel."""
    section = RUNBOOK.partition("\n## Ten faults\n")[2].partition("\n## ")[0]
    rows = [
        tuple(cell.strip() for cell in row.strip("|").split("|"))[:4] for row in section.splitlines() if row.startswith("| ")
    ][2:]
    wanted: set[tuple[str, ...]] = set()
    fault = ""
    told: set[tuple[str, ...]] = set()
    for first, alert, panel, command in rows:
        fault = first or fault
        told.add((fault, alert, panel, command))
    for drill in DRILLS:
        alert = f"[{drill.alert}](#{drill.alert.lower()})"
        for n, look in enumerate(drill.looks):
            command = f"`gpupool {look.command.replace('{request}', 'REQUEST_ID')}`"
            wanted.add((drill.fault, *((alert, f"*{drill.panel.title}*") if n == 0 else ("", "")), command))
    assert len({fault for fault, *_ in told}) == 10
    assert told == wanted


def test_faster_rules_differ_in_durations_only() -> None:
    """What fires in the test with real processes is what would fire in earnest."""
    text = RULES.read_text()
    quick = faster(text)
    blank = re.compile(r"\[[\dsmhd:]+\]|\boffset \w+|(?m:^\s+for: \w+$)")
    assert quick != text
    assert blank.sub("", quick) == blank.sub("", text)
    assert (CONFIGS / "prometheus" / "prometheus.yml").read_text().count("15s") >= 2
