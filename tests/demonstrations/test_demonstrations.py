"""The demonstrations in brief, without the bounds that a busy machine alone can break."""

from __future__ import annotations

from pathlib import Path

import pytest

from demonstrations.__main__ import ALL
from demonstrations.finding import broken, table

pytestmark = pytest.mark.processes


#: Of these nothing but times would be left, and they take long; what scrapes and alarms show is tried in tests/processes and tests/monitoring.
NOT_HERE = {"alarms", "batching", "buckets", "diagnosis", "fairness", "logging", "low-high", "objective", "scrapes", "threads"}


@pytest.mark.parametrize("name", sorted(set(ALL) - NOT_HERE))
def test_what_is_promised_can_be_shown(tmp_path: Path, name: str) -> None:
    show, _, brief = ALL[name]

    findings = show(tmp_path, brief)

    assert not [finding for finding in broken(findings) if not finding.timed], table(findings)
