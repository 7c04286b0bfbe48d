"""Reading exceptions of models."""

from __future__ import annotations

import pytest

from gpupool.errors import ErrorCode, InvalidInput, Poison, TooLarge
from gpupool.worker.faults import MAX_MESSAGE, Failure, FaultKind, classify, read_fault


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class AcceleratorError(RuntimeError):
    """Named as torch's, with its code."""

    def __init__(self, text: str, error_code: int) -> None:
        super().__init__(text)
        self.error_code = error_code


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: misaligned address",
        "CUDA error: an illegal instruction was encountered",
        "CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_errors_that_break_the_context_are_sticky(text: str) -> None:
    assert classify(["RuntimeError", "Exception"], text) is FaultKind.STICKY


@pytest.mark.parametrize("name", ["ValueError", "KeyError", "TypeError", "AssertionError"])
def test_a_plain_error_that_quotes_a_sticky_text_is_the_models(name: str) -> None:
    bases = {"KeyError": ["LookupError"]}.get(name, [])
    assert classify([name, *bases, "Exception"], "CUDA error: device-side assert triggered") is FaultKind.MODEL


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), FaultKind.OUT_OF_MEMORY),
        (MemoryError(), FaultKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), FaultKind.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), FaultKind.OUT_OF_MEMORY),
        (AcceleratorError("something new", 710), FaultKind.STICKY),
        (AcceleratorError("invalid argument", 1), FaultKind.MODEL),
        (RuntimeError("shape mismatch"), FaultKind.MODEL),
        (SystemExit(3), FaultKind.MODEL),
    ],
    ids=lambda v: v.name if isinstance(v, FaultKind) else type(v).__name__,
)
def test_exceptions_are_sorted(error: BaseException, kind: FaultKind) -> None:
    assert read_fault(error).kind is kind


def test_the_callers_message_names_the_class_and_the_words() -> None:
    assert read_fault(ValueError("sample 3 is bad")).failure == Failure(ErrorCode.MODEL_ERROR, "ValueError: sample 3 is bad")
    assert read_fault(KeyboardInterrupt()).failure.message == "KeyboardInterrupt"


def test_a_handler_may_choose_codes_that_speak_of_the_input() -> None:
    assert read_fault(InvalidInput("must be RGB", field="image")).failure == Failure(
        ErrorCode.INVALID_INPUT, "must be RGB", "image"
    )
    assert read_fault(TooLarge("at most 4096 tokens")).failure.code is ErrorCode.TOO_LARGE


def test_a_handler_may_not_speak_for_the_pool() -> None:
    assert read_fault(Poison("made up")).failure.code is ErrorCode.MODEL_ERROR


def test_an_exception_that_cannot_be_printed_is_still_read() -> None:
    assert "RuntimeError in str()" in read_fault(Unprintable()).failure.message


def test_long_words_are_cut() -> None:
    assert len(read_fault(ValueError("x" * 100_000)).failure.message) < MAX_MESSAGE + 50


def test_the_place_is_that_of_the_raising_frame() -> None:
    def deep() -> None:
        raise ValueError

    try:
        deep()
    except ValueError as e:
        where = read_fault(e).where

    assert where.startswith("test_faults.py:")
    assert where.endswith("in deep")
