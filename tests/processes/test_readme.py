"""What the README tells a newcomer to type is typed here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.running import GPUPOOL, RunningPool

pytestmark = pytest.mark.processes
README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language: str, containing: str) -> str:
    """The code block of a language that contains a text."""
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in b]
    assert len(found) == 1, containing
    text: str = found[0]
    return text


def test_the_model_the_configuration_and_the_clients_of_the_readme_work(
    tmp_path: Path, make_pool: Callable[..., RunningPool]
) -> None:
    pool = make_pool()
    (pool.folder / "my_model.py").write_text(block("python", "class Doubler"))
    toml = block("toml", "doubler").replace('devices = "auto"', f'devices = "cpu:1"\nruntime_dir = "{pool.runtime}"')
    pool.file.write_text(f'{toml}\n[router]\nbind = ["tcp://127.0.0.1:{pool.port}"]\n[http]\nbind = ""\n')
    checked = subprocess.run(
        [*GPUPOOL, "check-config", str(pool.file)], capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode == 0, checked.stderr
    pool.start()
    assert json.loads(pool.cli("call", '{"x": 14}').stdout)["result"] == 42.0

    for code in (block("python", "zmq.DEALER"), block("python", "from gpupool.client import Client").replace("10_000", "100")):
        code = code.replace("5555", str(pool.port))
        done = subprocess.run(
            [sys.executable, "-c", code], env=pool.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "42.0" in done.stdout
    req = block("python", "zmq.DEALER").replace("zmq.DEALER", "zmq.REQ").replace("5555", str(pool.port))
    done = subprocess.run([sys.executable, "-c", req], env=pool.env, capture_output=True, text=True, timeout=60, check=False)
    assert "42.0" in done.stdout
