"""Starts router processes for tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.router_process import RouterProcess


@pytest.fixture
def start_router(tmp_path: Path) -> Iterator[Callable[..., RouterProcess]]:
    """Start routers; each is up when returned, unless told otherwise, and ended with the test."""
    started: list[RouterProcess] = []
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:  # a socket's path must be short

        def start(*, up: bool = True, **options: Any) -> RouterProcess:
            router = RouterProcess(Path(folder), tmp_path / "log", **options)
            started.append(router)
            if up:
                router.wait_up()
            return router

        yield start
        for router in started:
            router.close()
