"""Whatever text a model's world holds - words, fields, class names, keys, values - a request gets one answer that can be sent and read."""

from __future__ import annotations

from typing import Any, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool import link
from gpupool.errors import ErrorCode, InvalidInput
from gpupool.link import RESULTS, Result, Work, unpack_results
from gpupool.logs import Log
from gpupool.samples import unpack_body
from gpupool.spec import BatchingSpec, ModelSpec
from gpupool.worker.batch import Batch, CloseReason, Share
from gpupool.worker.ceiling import Ceilings
from gpupool.worker.execute import Executor
from gpupool.worker.exhaustion import Exhaustion
from gpupool.worker.faults import MAX_FIELD, MAX_MESSAGE, presentable
from gpupool.worker.intake import Intake
from gpupool.worker.models import LoadError, Model
from gpupool.worker.preparers import Preparers
from gpupool.worker.replies import Replies, packed

STAGES = ("length", "preprocess", "forward", "postprocess")
#: Lone surrogates often: Python has them from json.loads and os.fsdecode, UTF-8 has not.
TEXTS = st.text(st.sampled_from("a\ud800\udfff\0\n…💥") | st.characters(), max_size=40) | st.just("\ud800" * 5000)
VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | TEXTS | st.binary(max_size=8) | st.just({1}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers() | st.just((1,)), inner, max_size=3),
    max_leaves=6,
)


class Quiet:
    """Stands for the board, the device and the log: takes whatever it is told."""

    @property
    def event(self) -> Quiet:
        return self

    def to_host(self, outputs: Any) -> Any:
        return outputs

    def at_rest(self) -> int:
        return 0

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def answers(model: Model, *, many: bool = False) -> list[Result]:
    """What a router reads of one request's way through all stages; what a link thread would die of is raised."""
    models, quiet = [model], cast("Any", Quiet())
    preparers = Preparers(models, clock=lambda: 50.0)
    intake = Intake(models, [model.spec.batching], preparers, lambda: 50.0)
    body = msgpack.packb([{"x": 1}] if many else {"x": 1})
    intake.put([Work(7, 0, link.WorkFlag.MANY if many else 0, 1, 10.0, 5, [body])], 1, 50.0, queued=0)
    items, results = intake.advance()
    while preparers.step(0, 1):
        pass
    more, others = intake.advance()
    executor = Executor(
        models, [model.spec.batching], quiet, quiet, Ceilings(), cast("Log", quiet), Exhaustion(), batch_timeout_s=60.0,
        clock=lambda: 50.0,
    )  # fmt: skip
    results += others
    for item in items + more:
        batch = Batch(item.key, [Share(item, 0, item.rows)], item.rows, CloseReason.FULL)
        done, _ = executor.run(batch, list(item.owner.samples(0, item.rows)))
        results += Replies(models, lambda: 50.0).of(done)
    return unpack_results(link.pack_results(results))


def model(stage: str, act: Any) -> Model:
    methods: dict[str, Any] = {"forward": list, "length": lambda _: 1, "postprocess": lambda result: result}
    methods[stage] = act
    return Model(ModelSpec("m", batching=BatchingSpec()), **methods)


def raising(make: Any) -> Any:
    def act(_: Any) -> Any:
        raise make()

    return act


@given(stage=st.sampled_from(STAGES), words=TEXTS, many=st.booleans())
def test_any_words_of_an_exception_are_one_answer(stage: str, words: str, many: bool) -> None:
    (result,) = answers(model(stage, raising(lambda: ValueError(words))), many=many)

    assert (result.ticket, result.code) == (7, "model_error")
    assert "ValueError" in result.message
    assert len(result.message) <= MAX_MESSAGE + 1


@given(stage=st.sampled_from(STAGES), field=TEXTS | st.integers() | st.binary() | st.lists(TEXTS), words=TEXTS)
def test_any_field_of_a_refusal_is_one_answer(stage: str, field: Any, words: str) -> None:
    (result,) = answers(model(stage, raising(lambda: InvalidInput(words, field=field))))

    assert (result.ticket, result.code) == (7, "invalid_input")
    assert type(result.field) is str
    assert len(result.field) <= MAX_FIELD + 1


@given(stage=st.sampled_from(("forward", "postprocess")), value=VALUES)
def test_any_result_is_one_answer(stage: str, value: Any) -> None:
    def act(given: Any) -> Any:
        return [value] if stage == "forward" else value

    (result,) = answers(model(stage, act))

    assert result.ticket == 7
    assert result.code in ("ok", "model_error")
    if result.code == "ok":
        unpack_body(result.frames[0], result.frames[1:])


class Spiteful(type):
    """A class whose very name cannot be had in the usual ways."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class Spite(InvalidInput, metaclass=Spiteful):
    """An exception of which every attribute raises."""

    def __init__(self) -> None: ...

    def __str__(self) -> str:
        raise SystemExit("no words")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no attribute")


class Masked(Exception):
    """An exception that does not even say what it is an instance of."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class Slippery(str):
    """A text whose methods lie."""

    __slots__ = ()

    def __len__(self) -> int:
        return 0

    def encode(self, *_: Any, **__: Any) -> bytes:
        raise RuntimeError("no bytes")

    def __getitem__(self, _: Any) -> str:
        return "\ud800"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Spite(),
        Masked,
        lambda: ValueError(Slippery("\ud800" * 5000)),
        lambda: InvalidInput("x", field=Slippery("\ud800")),
    ],
)
def test_an_exception_of_the_models_own_making_is_one_answer(stage: str, make: Any) -> None:
    (result,) = answers(model(stage, raising(make)))

    assert result.code in ("model_error", "invalid_input")


def test_text_is_cut_and_what_is_no_text_is_told_as_such() -> None:
    assert presentable("x" * 1000, 10) == "x" * 10 + "…"
    assert presentable("a\ud800b", 10) == "a?b"
    assert presentable("né💥", 10) == "né💥"
    assert presentable(5, 10) == "5"


def test_a_load_error_can_be_sent() -> None:
    error = LoadError("load", "m", "no file \udcff" + "x" * 5000, "trace \udcff")

    assert len(error.message) < 1100
    msgpack.packb([error.message, error.trace])


def test_one_answer_that_cannot_be_packed_costs_no_other_its_own() -> None:
    told: list[tuple[int, str]] = []
    answers = [
        Result(1, "ok", frames=[b"\x01"]), Result(2, "model_error", "\ud800"), Result(3, "ok", length=10**30), Result(4, "ok", frames=[b"\x02"]),
    ]  # fmt: skip

    frames = packed(answers, lambda result, error: told.append((result.ticket, type(error).__name__)))

    assert frames[0] == RESULTS
    read = unpack_results(frames)
    assert [(r.ticket, r.code) for r in read] == [(1, "ok"), (2, ErrorCode.INTERNAL), (3, ErrorCode.INTERNAL), (4, "ok")]
    assert told == [(2, "UnicodeEncodeError"), (3, "OverflowError")]
    assert "UnicodeEncodeError" in read[1].message
