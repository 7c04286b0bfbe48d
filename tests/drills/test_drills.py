"""Some cells of the drill report, as a test: whatever dies, no request is lost and nobody else is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from drills.cgroup import ConfinedPool, memory_group
from drills.matrix import FAULTS, OOM, Ground

pytestmark = pytest.mark.processes
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One pool for all cells."""
    ground = Ground(Path(tmp_path_factory.mktemp("drills")) / "pool")
    yield ground
    ground.pool.close()


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        ("SIGKILL", "idle"),
        ("SIGKILL", "loading"),
        ("SIGSEGV", "in a batch"),
        ("SIGSTOP", "in a batch"),
        ("exit 0", "idle"),
        ("hang in C, interpreter lock held", "in a batch"),
        ("error at import", "loading"),
        ("death at first batch", "in a batch"),
        ("no fault: busy 1.8 s, lock held", "in a batch"),
    ],
)
def test_no_request_is_lost_and_nobody_else_is_killed(ground: Ground, fault: str, moment: str) -> None:
    cell = ground.measure(BY_NAME[fault], moment)

    assert (cell.lost, cell.wrong_kills) == (0, 0), cell
    assert cell.sent > 20
    if BY_NAME[fault].deadly:
        assert cell.detected_s is not None, cell
        assert cell.back_s is not None, cell


def test_a_kill_by_the_kernel_is_told_as_such_and_takes_the_worker_that_grew(tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group())
        except OSError as e:
            pytest.skip(f"no group with a memory limit can be made here: {e}")
        confined = Ground(tmp_path / "pool", partial(ConfinedPool, group=group))
        stack.enter_context(closing(confined.pool))

        cell = confined.measure(OOM, "in a batch")

    assert (cell.lost, cell.wrong_kills) == (0, 0), cell
    assert cell.cause == "killed by the kernel's OOM killer"
