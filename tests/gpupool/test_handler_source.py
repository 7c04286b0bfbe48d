"""Handler classes are found by reading: what surely is not there is refused, what cannot be told is left to the worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpupool.handler_source import handler_problem


def problem(folder: Path, source: str, handler: str = "some_handler:Echo") -> tuple[str, str] | None:
    (folder / "some_handler.py").write_text(source)
    return handler_problem(handler, [str(folder)])


@pytest.mark.parametrize(
    "source",
    [
        "class Echo: ...",
        "def Echo(): ...",
        "Echo = make()",
        "from elsewhere import Echo",
        "from elsewhere import Other as Echo",
        "import elsewhere as Echo",
        "try:\n    from a import Echo\nexcept ImportError:\n    Echo = None",
        "if fast:\n    class Echo: ...",
        "for Echo in things: ...",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "globals()['Echo'] = make()",
        "exec(text)",
    ],
)
def test_whatever_may_bind_the_name_is_accepted(tmp_path: Path, source: str) -> None:
    assert problem(tmp_path, source) is None


@pytest.mark.parametrize("source", ["", "class Eco: ...", "print(Echo)", "'class Echo'"])
def test_a_name_that_nothing_binds_is_refused(tmp_path: Path, source: str) -> None:
    found = problem(tmp_path, source)

    assert found is not None and 'has no "Echo"' in found[1]


def test_a_module_that_does_not_parse_is_refused_with_its_line(tmp_path: Path) -> None:
    found = problem(tmp_path, "class Echo:\n    def f(: ...\n")

    assert found is not None and "line 2" in found[1]


def test_odd_escapes_in_a_module_raise_no_warning(tmp_path: Path) -> None:
    assert problem(tmp_path, "class Echo:\n    x = '\\d'\n") is None


def test_modules_of_packages_are_found_without_importing_them(tmp_path: Path) -> None:
    package = tmp_path / "some_pkg" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "some_pkg" / "__init__.py").write_text("raise SystemExit\n")
    (package / "deep.py").write_text("class Echo: ...\n")

    assert handler_problem("some_pkg.inner.deep:Echo", [str(tmp_path)]) is None
    assert handler_problem("some_pkg.inner.dep:Echo", [str(tmp_path)]) is not None
    assert handler_problem("some_pkg.inner.deep.er:Echo", [str(tmp_path)]) is not None
    assert "some_pkg" not in sys.modules


def test_a_package_that_makes_its_own_path_is_left_to_the_worker(tmp_path: Path) -> None:
    (tmp_path / "some_pkg").mkdir()
    (tmp_path / "some_pkg" / "__init__.py").write_text("__path__ = find()\n")

    assert handler_problem("some_pkg.anything:Echo", [str(tmp_path)]) is None


@pytest.mark.parametrize("handler", ["sys:Echo", "zlib:Echo", "itertools:Echo"])
def test_modules_without_source_are_left_to_the_worker(handler: str) -> None:
    assert handler_problem(handler, []) is None


def test_a_module_written_a_moment_ago_is_found(tmp_path: Path) -> None:
    assert handler_problem("just_now:Echo", [str(tmp_path)]) is not None
    (tmp_path / "just_now.py").write_text("class Echo: ...\n")

    assert handler_problem("just_now:Echo", [str(tmp_path)]) is None
