"""A short soak, as a test; `make soak` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak.__main__ import table
from soak.session import soak

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_under_mixed_load_and_disturbances_every_request_is_answered_once(tmp_path: Path) -> None:
    outcome = soak(tmp_path, seconds=20.0, seed=1)

    assert not outcome.violations, table(outcome)
    assert outcome.disturbed.total() >= 5, table(outcome)
    assert outcome.watch.samples >= 10, table(outcome)


def test_over_deaths_of_the_router_callers_of_the_library_see_no_error(tmp_path: Path) -> None:
    outcome = soak(tmp_path, seconds=15.0, seed=2, router_kills=True)

    assert not outcome.violations, table(outcome)
    assert outcome.watch.restarts >= 1, table(outcome)
