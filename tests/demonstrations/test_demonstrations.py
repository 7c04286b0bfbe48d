"""The demonstrations in brief, without the bounds that a busy machine alone can break."""

from __future__ import annotations

from pathlib import Path

import pytest

from demonstrations.__main__ import ALL
from demonstrations.finding import broken, table

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", [name for name in ALL if name != "fairness"])  # of which nothing but times would be left
def test_what_is_promised_can_be_shown(tmp_path: Path, name: str) -> None:
    show, _, brief = ALL[name]

    findings = show(tmp_path, brief)

    assert not [finding for finding in broken(findings) if not finding.timed], table(findings)
