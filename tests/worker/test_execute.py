"""Running a batch, and what becomes of one that fails. Fakes for the board, the device and the clock."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from gpupool.errors import ErrorCode, InvalidInput
from gpupool.logs import Log
from gpupool.spec import BatchingSpec, ModelSpec
from gpupool.worker.batch import Batch, CloseReason, Item, Share
from gpupool.worker.ceiling import PATIENCE, Ceilings
from gpupool.worker.execute import ContractError, Executor, check_outputs
from gpupool.worker.exhaustion import Exhaustion
from gpupool.worker.faults import Failure, FaultKind, StickyFault
from gpupool.worker.models import Model

KEY = (0, 0)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class FakeRecord:
    def __init__(self) -> None:
        self.tries: list[list[int]] = []
        self.errors: list[FaultKind] = []
        self.batches: list[int] = []

    def running(self, tickets: Sequence[int], timeout_s: float) -> None:
        assert timeout_s == 60.0
        self.tries.append(list(tickets))

    def idle(self) -> None: ...

    def ran(self, samples: int) -> None:
        self.batches.append(samples)

    def error(self, kind: FaultKind) -> None:
        self.errors.append(kind)


class FakeDevice:
    def __init__(self) -> None:
        self.released = 0
        self.held = 0

    def synchronize(self) -> None: ...

    def to_host(self, outputs: Any) -> Any:
        return outputs

    def brace(self) -> None: ...

    def relieve(self) -> None: ...

    def release(self) -> None:
        self.released += 1

    def at_rest(self) -> int:
        return self.held


class FakeLog:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.event = self

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    info = warning


class Bench:
    """An executor with all that it touches."""

    def __init__(self, forward: Callable[[list[Any]], Any], max_batch: int = 8) -> None:
        self.record, self.device, self.log, self.ceilings = FakeRecord(), FakeDevice(), FakeLog(), Ceilings()
        self.exhaustion = Exhaustion()
        spec = ModelSpec("m", batching=BatchingSpec(max_batch=max_batch))
        times = iter(range(10**9))
        self.executor = Executor(
            [Model(spec, forward)], [spec.batching], self.record, self.device, self.ceilings, cast("Log", self.log),
            self.exhaustion, batch_timeout_s=60.0, clock=lambda: float(next(times)),
        )  # fmt: skip

    def run(self, *samples: Any, rows: Sequence[int] | None = None) -> list[Any]:
        """Run samples as requests 100, 101, …; `rows` says how many each request has."""
        counts = rows or [1] * len(samples)
        shares = [Share(Item(100 + n, KEY, 1e9, count), 0, count) for n, count in enumerate(counts)]
        done, self.batches = self.executor.run(Batch(KEY, shares, len(samples), CloseReason.FULL), list(samples))
        return list(done.outputs)


def codes(outputs: list[Any]) -> list[Any]:
    return [o.code if type(o) is Failure else o for o in outputs]


def refuse(bad: Any, error: BaseException) -> Callable[[list[Any]], list[Any]]:
    def forward(batch: list[Any]) -> list[Any]:
        if bad in batch:
            raise error
        return [x * 10 for x in batch]

    return forward


def fits(most: int, never: Any = None) -> Callable[[list[Any]], list[Any]]:
    def forward(batch: list[Any]) -> list[Any]:
        if len(batch) > most or never in batch:
            raise OutOfMemoryError("CUDA out of memory")
        return batch

    return forward


def test_a_good_batch_runs_once_and_is_counted() -> None:
    bench = Bench(lambda batch: [x + 1 for x in batch])

    assert bench.run(1, 2, 3) == [2, 3, 4]
    assert bench.batches
    assert bench.record.tries == [[100, 101, 102]]
    assert bench.record.batches == [3]


def test_one_bad_sample_of_eight_is_found_and_the_others_answered() -> None:
    bench = Bench(refuse(4, ValueError("sample 4 is bad")))

    outputs = bench.run(0, 1, 2, 3, 4, 5, 6, 7)

    assert outputs[4] == Failure(ErrorCode.MODEL_ERROR, "ValueError: sample 4 is bad")
    assert outputs[:4] + outputs[5:] == [0, 10, 20, 30, 50, 60, 70]
    assert not bench.batches
    assert bench.record.batches == [8]


def test_each_try_names_on_the_board_what_it_runs() -> None:
    bench = Bench(refuse(1, ValueError()))
    bench.run(0, 1, 2, 3)

    assert bench.record.tries == [[100, 101, 102, 103], [100, 101], [100], [101], [102, 103]]


def test_rows_of_one_request_are_one_ticket() -> None:
    bench = Bench(refuse(2, ValueError()))
    bench.run(0, 1, 2, rows=[2, 1])

    assert bench.record.tries[0] == [100, 101]
    assert [100] in bench.record.tries


def test_a_batch_that_is_bad_only_together_is_answered_in_full() -> None:
    def forward(batch: list[int]) -> list[int]:
        if len(set(batch)) > 1:
            raise ValueError("unlike shapes")
        return batch

    assert Bench(forward).run(1, 1, 2, 2) == [1, 1, 2, 2]


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_a_handler_that_wants_to_end_the_process_only_fails_its_sample(error: BaseException) -> None:
    outputs = Bench(refuse(1, error)).run(0, 1)

    assert codes(outputs) == [0, ErrorCode.MODEL_ERROR]


def test_a_handler_may_refuse_its_input() -> None:
    outputs = Bench(refuse(1, InvalidInput("too dark", field="image"))).run(0, 1)

    assert outputs == [0, Failure(ErrorCode.INVALID_INPUT, "too dark", "image")]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda b: b[:-1], "{less} results for {n} samples"),
        (lambda b: [*b, None], "{more} results for {n} samples"),
        (lambda b: None, "NoneType"),
        (lambda b: (x for x in b), "generator"),
        (lambda b: dict(enumerate(b)), "dict"),
        (lambda b: "x" * len(b), "str"),
        (lambda b: set(b), "set"),
    ],
    ids=["short", "long", "none", "generator", "dict", "text", "set"],
)
def test_outputs_that_are_not_one_per_sample_fail_the_batch(wrong: Callable[[list[Any]], Any], words: str, size: int) -> None:
    bench = Bench(wrong)

    outputs = bench.run(*range(size))

    expected = words.format(n=size, less=size - 1, more=size + 1)
    assert codes(outputs) == [ErrorCode.MODEL_ERROR] * size
    assert all(expected in o.message for o in outputs)
    assert len(bench.record.tries) == 1
    assert expected in bench.log.lines[0]["detail"]


def test_arrays_count_by_their_first_dimension() -> None:
    np = pytest.importorskip("numpy")

    assert [row.tolist() for row in check_outputs(np.arange(6).reshape(3, 2), 3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ContractError, match="1 results for 4 samples"):
        check_outputs(np.zeros((1, 4)), 4)
    with pytest.raises(ContractError, match="without dimensions"):
        check_outputs(np.float32(1.0), 1)


def test_a_batch_in_one_piece_is_counted_copied_once_and_then_taken_apart() -> None:
    np = pytest.importorskip("numpy")
    copied = []

    def to_host(outputs: Any) -> Any:
        copied.append(outputs)
        return outputs + 1

    whole = np.zeros((3, 2))

    assert [row.tolist() for row in check_outputs(whole, 3, to_host)] == [[1, 1]] * 3
    with pytest.raises(ContractError):
        check_outputs(whole, 4, to_host)
    assert len(copied) == 1
    assert copied[0] is whole


def test_results_that_do_not_fit_into_host_memory_are_answered_in_parts() -> None:
    bench = Bench(lambda batch: batch)

    def to_host(outputs: list[Any]) -> list[Any]:
        if len(outputs) > 2:
            raise RuntimeError("CUDA error: out of memory")
        return outputs

    bench.device.to_host = to_host  # type: ignore[method-assign]

    assert bench.run(*range(8)) == list(range(8))
    assert set(bench.record.errors) == {FaultKind.OUT_OF_MEMORY}


def test_a_table_is_no_list_of_results() -> None:
    class Table:
        shape = (2, 2)

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[str]:
            return iter(("column a", "column b"))

        def __getitem__(self, key: str) -> str:
            return key

    with pytest.raises(ContractError, match="Table"):
        check_outputs(Table(), 2)


def test_a_batch_that_does_not_fit_is_answered_in_parts_and_remembered() -> None:
    bench = Bench(fits(4))

    assert bench.run(*range(8)) == list(range(8))
    assert bench.ceilings.limit(KEY) == 4
    assert bench.device.released == 1
    assert bench.record.errors == [FaultKind.OUT_OF_MEMORY]


def test_a_size_that_is_too_large_is_not_tried_again_in_the_same_batch() -> None:
    bench = Bench(fits(4), max_batch=16)

    assert bench.run(*range(16)) == list(range(16))
    assert [len(tickets) for tickets in bench.record.tries] == [16, 8, 4, 4, 4, 4]
    assert bench.exhaustion.failures == 2


def test_one_oversize_sample_does_not_have_the_others_run_in_pieces() -> None:
    bench = Bench(fits(16, never=0), max_batch=16)
    bench.run(*range(16))

    assert [len(tickets) for tickets in bench.record.tries] == [16, 8, 4, 2, 1, 1, 2, 4, 8]


def test_the_ceiling_recovers_when_memory_is_back() -> None:
    bench = Bench(fits(4))
    bench.run(*range(8))

    for _ in range(PATIENCE):
        bench.run(*range(4))

    assert bench.ceilings.limit(KEY) == 5


def test_a_sample_that_fits_nowhere_fails_alone_and_lowers_nothing() -> None:
    bench = Bench(fits(8, never=3))

    assert codes(bench.run(*range(8))) == [0, 1, 2, ErrorCode.OUT_OF_MEMORY, 4, 5, 6, 7]
    assert bench.ceilings.limit(KEY) is None


def test_the_exception_and_what_its_frames_hold_are_gone_before_the_retry() -> None:
    class Tensor:
        """Stands for device memory."""

    alive: list[weakref.ref[Tensor]] = []

    def forward(batch: list[int]) -> list[int]:
        assert all(ref() is None for ref in alive), "memory of the failed try is still held"
        held = Tensor()
        alive.append(weakref.ref(held))
        if len(batch) > 1:
            raise OutOfMemoryError("CUDA out of memory")
        return batch

    gc.disable()
    try:
        assert Bench(forward).run(1, 2, 3, 4) == [1, 2, 3, 4]
    finally:
        gc.enable()


def test_a_sticky_error_ends_the_process_with_the_whole_batch_named() -> None:
    bench = Bench(refuse(5, RuntimeError("CUDA error: device-side assert triggered")))

    with pytest.raises(StickyFault, match="RuntimeError at test_execute"):
        bench.run(4, 5, 6)

    assert bench.record.tries == [[100, 101, 102]] * 2
    assert bench.record.errors == [FaultKind.STICKY]


def test_a_sticky_error_in_a_retry_stops_all_further_tries() -> None:
    def forward(batch: list[int]) -> list[int]:
        raise ValueError if len(batch) > 1 else RuntimeError("CUDA error: an illegal memory access was encountered")

    bench = Bench(forward)
    with pytest.raises(StickyFault):
        bench.run(1, 2, 3, 4)

    assert bench.record.tries == [[100, 101, 102, 103], [100, 101], [100], [100, 101, 102, 103]]


def test_samples_that_fail_alike_are_one_line_of_the_log() -> None:
    bench = Bench(fits(0))
    bench.run(*range(8))

    assert [(line["error"], line["samples"], line["batch_size"]) for line in bench.log.lines] == [("OutOfMemoryError", 8, 8)]


def test_no_line_of_the_log_repeats_what_an_exception_quotes() -> None:
    bench = Bench(refuse(1, ValueError("secret-marker")))
    bench.run(0, 1)

    assert bench.log.lines[0]["error"] == "ValueError"
    assert "secret-marker" not in str(bench.log.lines)
