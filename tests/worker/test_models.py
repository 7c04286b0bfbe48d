"""Importing, loading and warming up handlers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupool.spec import BatchingSpec, ModelSpec
from gpupool.worker.execute import check_outputs
from gpupool.worker.models import LoadError, import_model, load_model, put_first, threads, warm_up


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    put_first(str(folder))
    return name


def spec(handler: str, **fields: Any) -> ModelSpec:
    return ModelSpec("m", handler=handler, **fields)


def test_a_handler_is_found_and_what_it_lacks_is_none(tmp_path: Path) -> None:
    name = write(
        tmp_path, "wm_one", "class Echo:\n    def forward(self, b): return b\n    def length(self, s): return len(s)\n"
    )

    model = import_model(spec(f"{name}:Echo"))

    assert model.forward([1]) == [1]
    assert model.length is not None
    assert model.length("abc") == 3
    assert model.preprocess is None


@pytest.mark.parametrize(
    ("text", "handler", "words"),
    [
        ("", "wm_bad", "pkg.module:Class"),
        ("", "wm_bad:Missing", "Missing"),
        ("class A: pass", "wm_bad:A", "no method forward"),
        ("1/0", "wm_bad:A", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "wm_bad:A", "SystemExit: 3"),
        ("class A:\n    def __init__(self, x): pass\n    def forward(self, b): pass", "wm_bad:A", "TypeError"),
        ("", "wm_nowhere:A", "No module named"),
    ],
    ids=["form", "class", "forward", "raises", "exits", "arguments", "module"],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, text: str, handler: str, words: str) -> None:
    write(tmp_path, "wm_bad", text)

    with pytest.raises(LoadError, match=words) as caught:
        import_model(spec(handler))

    assert caught.value.stage == ("config" if "forward" in str(caught.value) else "import")


def test_load_is_given_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    name = write(tmp_path, "wm_ctx", "class A:\n    def load(self, c): self.c = c\n    def forward(self, b): return self.c\n")
    model = import_model(spec(f"{name}:A", options={"precision": "bf16", "k": 1}, directory=str(tmp_path)))

    load_model(model, "cuda:0")

    context = model.forward([])
    assert (context.device, context.options["k"], context.precision, context.threads) == ("cuda:0", 1, "bf16", 3)
    assert context.directory == str(tmp_path)


def test_threads_follow_the_affinity_without_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")

    assert threads() >= 1


def test_a_load_that_raises_tells_its_stage_and_trace(tmp_path: Path) -> None:
    name = write(
        tmp_path, "wm_load", "class A:\n    def load(self, c): raise OSError('no weights')\n    def forward(self, b): ...\n"
    )
    model = import_model(spec(f"{name}:A"))

    with pytest.raises(LoadError, match="no weights") as caught:
        load_model(model, "cpu")

    assert caught.value.stage == "load"
    assert "wm_load.py" in caught.value.trace


WARM = """
class A:
    sizes = []
    def warmup(self): return {samples}
    def preprocess(self, s): return s + 1
    def forward(self, b):
        self.sizes.append(list(b))
        return {result}
"""


def test_samples_of_warmup_run_in_batches(tmp_path: Path) -> None:
    name = write(tmp_path, "wm_warm", WARM.format(samples="range(5)", result="b"))
    model = import_model(spec(f"{name}:A", batching=BatchingSpec(max_batch=2)))

    assert [p.sample for p in warm_up(model, check_outputs, lambda: None)] == [1, 2, 3, 4, 5]
    assert sys.modules[name].A.sizes == [[1, 2], [3, 4], [5]]


def test_a_warmup_that_runs_by_itself_returns_nothing(tmp_path: Path) -> None:
    name = write(tmp_path, "wm_self", WARM.format(samples="None", result="b"))

    assert warm_up(import_model(spec(f"{name}:A")), check_outputs, lambda: None) == []


def test_a_model_that_breaks_its_contract_is_found_while_warming_up(tmp_path: Path) -> None:
    name = write(tmp_path, "wm_short", WARM.format(samples="[1, 2]", result="b[1:]"))

    with pytest.raises(LoadError, match="1 results for 2 samples") as caught:
        warm_up(import_model(spec(f"{name}:A")), check_outputs, lambda: None)

    assert caught.value.stage == "warm_up"


def test_two_directories_may_have_a_module_of_the_same_name(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "wm_same.py").write_text(f"class A:\n    def forward(self, b): return {number}\n")

    first, second = (import_model(spec("wm_same:A", directory=str(tmp_path / str(n)))) for n in (1, 2))

    assert (first.forward([]), second.forward([])) == (1, 2)
