"""Who may import whom: read from the sources, so that no import hidden in a function escapes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROCESSES = ("supervisor", "router", "worker")
FOLDERS = (*PROCESSES, "supervisor/cards")
#: Modules that may touch the clock, sockets, files, the environment or threads. All others only compute.
SHELLS = {
    "supervisor": {
        "__init__", "card_watch", "children", "chronicle", "control", "devices", "drill", "instance", "listeners", "log_place", "loop", "main", "notify", "oom", "probes",
        "process", "socket_watch", "state_file", "verbs",
    },
    "supervisor/cards": {
        "__init__", "card_reader", "inventory", "kernel_log", "probe", "side_car", "topology", "xid_watch",
    },
    "router": {"__init__", "__main__", "collector_http", "door", "hoards", "keyring", "loop", "sockets", "span_export"},
    # Those besides the threads and the device take their clock as an argument and only name its default.
    "worker": {
        "__init__", "__main__", "backlog", "beat", "budget", "dealer", "device", "drill", "execute", "faults", "intake", "link", "models",
        "preparers", "profile", "record", "recorders", "recording_guard", "replies", "report", "snapshot", "transfer",
    },
}  # fmt: skip
IMPURE = {
    "os",
    "time",
    "random",
    "asyncio",
    "socket",
    "select",
    "threading",
    "subprocess",
    "signal",
    "zmq",
    "torch",
    "structlog",
    "uvloop",
    "psutil",
}


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all that a file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_process_imports_another(folder: str) -> None:
    others = tuple(f"gpupool.{p}" for p in PROCESSES if p != folder.partition("/")[0])
    for path in sources(folder):
        for name in imports(path):
            assert not name.startswith(others), f"{path.name} imports {name}"
            assert name.partition(".")[0] not in PROCESSES, f"{path.name}: say gpupool.{name}, or import it relatively"


def test_torch_is_imported_by_workers_only() -> None:
    allowed = {"worker", "data", "models"}
    for path in ROOT.glob("[gsrw]*/**/*.py"):
        if allowed & set(path.relative_to(ROOT).parts):
            continue
        assert not any(n.split(".")[0] == "torch" for n in imports(path)), path


def test_nvml_is_imported_by_the_processes_that_may_hang_only() -> None:
    for folder in ("gpupool", *PROCESSES, "supervisor/cards"):
        for path in sources(folder):
            if path.name not in ("inventory.py", "probe.py"):
                assert not any(n.split(".")[0] == "pynvml" for n in imports(path)), path


def test_opentelemetry_is_imported_by_one_module_only() -> None:
    for folder in ("gpupool", "gpupool/client", *PROCESSES):
        for path in sources(folder):
            if path.name != "spans.py":
                assert not any(n.split(".")[0] == "opentelemetry" for n in imports(path)), path


@pytest.mark.parametrize("folder", SHELLS)
def test_what_is_not_a_shell_is_pure(folder: str) -> None:
    for path in sources(folder):
        if path.stem in SHELLS[folder]:
            continue
        impure = {n for n in imports(path) if n.split(".")[0] in IMPURE}
        # A random generator is handed in; naming its type is no act.
        assert not impure - {"random"}, f"{folder}/{path.name} imports {sorted(impure)}"


@pytest.mark.parametrize(
    "module", ["gpupool", "gpupool.wire", "gpupool.client", "gpupool.cli", "gpupool.supervisor.loop", "gpupool.router.core"]
)
def test_torch_stays_out_of_all_but_the_worker(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
