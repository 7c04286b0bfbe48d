"""What the exporter of traces needs from the host."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from gpupool.config import ConfigErrors, load_config
from gpupool.trace_headers import HeadersError, read_headers

TRACES = '[traces]\nendpoint = "http://127.0.0.1:4318/v1/traces"\n'


def config(folder: Path, traces: str) -> Path:
    (folder / "mine.py").write_text("class M:\n    def forward(self, batch): return batch\n")
    file = folder / "pool.toml"
    file.write_text(f'[[model]]\nname = "m"\nhandler = "mine:M"\n{traces}')
    return file


def private(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "headers"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_headers_are_read_line_by_line(tmp_path: Path) -> None:
    path = private(tmp_path, "# a comment\n\nAuthorization: Bearer a:b c \nx-scope:  7\n")

    assert read_headers(path) == {"Authorization": "Bearer a:b c", "x-scope": "7"}


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("t0ken", 0o600, "line 1"),
        ("A: b\nt0ken é: x", 0o600, "line 2"),
        ("A: t0ken", 0o640, "0640"),
        ("A: " + "t0ken" * 9999, 0o600, "more than"),
    ],
)
def test_what_are_no_headers_is_refused_without_being_quoted(tmp_path: Path, text: str, mode: int, said: str) -> None:
    with pytest.raises(HeadersError, match=said) as caught:
        read_headers(private(tmp_path, text, mode))

    assert "t0ken" not in str(caught.value)


def test_a_missing_file_of_headers_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"traces\.headers_file"):
        load_config(config(tmp_path, '[traces]\nheaders_file = "none"\n'))


def test_an_endpoint_without_the_library_is_refused_and_the_extra_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.startswith("opentelemetry") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigErrors, match=r"opentelemetry-sdk.*gpupool\[traces\]"):
        load_config(config(tmp_path, TRACES))
    assert load_config(config(tmp_path, "")).traces.endpoint == ""


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:4318",
        "ftp://host/",
        "http://",
        "http://us:pw@host/",
        "http://host:99999/",
        "http://host/ x",
        "grpc://host:4317",
    ],
)
def test_an_endpoint_that_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigErrors, match=r"traces\.endpoint"):
        load_config(config(tmp_path, f'[traces]\nendpoint = "{url}"\n'))


def test_reading_a_configuration_imports_no_opentelemetry(tmp_path: Path) -> None:
    """In a process of its own: what another test has imported would hide it. Namespaces on the way have no code."""
    pytest.importorskip("opentelemetry.sdk")
    code = """
import sys
from pathlib import Path
from gpupool.config import load_config
load_config(Path(sys.argv[1]))
print([n for n, m in sys.modules.items() if n.startswith("opentelemetry") and getattr(m, "__file__", None)])
"""
    command = [sys.executable, "-c", code, str(config(tmp_path, TRACES))]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip() == "[]"
