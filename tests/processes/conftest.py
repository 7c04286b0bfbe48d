"""Real pools for process tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.running import RunningPool

MakePool = Callable[..., RunningPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    """Make pools that end with the test."""
    pools: list[RunningPool] = []

    def make(*args: object, **kwargs: object) -> RunningPool:
        folder = tmp_path / str(len(pools))
        folder.mkdir()
        pools.append(RunningPool(folder, *args, **kwargs))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
