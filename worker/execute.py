"""Run one batch: forward, the check of what came back, and what to do when it failed.

A batch that raises is split in halves, again and again, until those samples stand alone that fail by themselves: nobody is blamed for
another's sample. A batch that did not fit into memory goes the same way and teaches the ceiling. What breaks the device for
good (StickyFault) ends the process instead, with the whole batch unanswered: the router runs it elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gpupool.errors import ErrorCode
from gpupool.logs import Log
from gpupool.spec import BatchingSpec

from .batch import Batch
from .ceiling import Ceilings
from .exhaustion import Exhaustion
from .faults import Failure, Fault, FaultKind, StickyFault, read_fault
from .models import Model, inference_mode
from .replies import Done


class BatchRecord(Protocol):
    """What execution tells the board."""

    def running(self, tickets: Sequence[int], timeout_s: float) -> None:
        """Name what runs now, with a fresh deadline."""

    def idle(self) -> None:
        """Nothing runs."""

    def ran(self, samples: int) -> None:
        """A batch has run, well or in parts."""

    def error(self, kind: FaultKind) -> None:
        """A fault came up."""


class Compute(Protocol):
    """What execution asks of the device."""

    def synchronize(self) -> None:
        """Wait for launched work."""

    def to_host(self, outputs: Any) -> Any:
        """Bring results into the process's own memory, as they are otherwise."""

    def brace(self) -> None:
        """Be ready for a run that may not fit."""

    def relieve(self) -> None:
        """Make room at once: a run has failed."""

    def release(self) -> None:
        """Give memory back."""

    def at_rest(self) -> int:
        """Return what is held although nothing runs, in bytes."""


#: For an out-of-memory error that cannot even be read: made while there is memory.
_TOO_FULL_TO_SAY = Fault(
    FaultKind.OUT_OF_MEMORY, Failure(ErrorCode.OUT_OF_MEMORY, "out of memory"), "MemoryError", "somewhere in forward"
)


class ContractError(Exception):
    """Forward returned something that is not one result per sample."""


def check_outputs(outputs: Any, expected: int, to_host: Callable[[Any], Any] = lambda outputs: outputs) -> list[Any]:
    """Return one result per sample, from a list, a tuple, or an array or tensor whose first dimension counts the samples.

    Args:
        outputs: what forward returned.
        expected: how many samples it was given.
        to_host: copies tensors from the card, a whole batch's before it is taken apart into rows.

    Raises:
        ContractError: naming both numbers, or the type. Nothing is ever assigned to callers by a guess.
    """
    if not isinstance(outputs, (list, tuple)):
        shape = getattr(outputs, "shape", None)
        if shape is None or not hasattr(outputs, "dtype"):  # a table has a shape too, but iterates over its columns
            raise ContractError(f"forward returned {type(outputs).__name__}, expected a list of {expected} results")
        if not len(shape):
            raise ContractError(f"forward returned an array without dimensions, expected {expected} results")
        if hasattr(outputs, "detach"):
            outputs = outputs.detach()
    if len(outputs) != expected:
        raise ContractError(f"forward returned {len(outputs)} results for {expected} samples")
    return list(to_host(outputs))


class Executor:
    """Runs batches on one device.

    Args:
        models: loaded models by number.
        policies: their batching settings now.
        exhaustion: is told of what did not fit.
        batch_timeout_s: what the board promises for one forward; each try of a split batch gets it anew.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        models: Sequence[Model],
        policies: Sequence[BatchingSpec],
        record: BatchRecord,
        device: Compute,
        ceilings: Ceilings,
        log: Log,
        exhaustion: Exhaustion,
        *,
        batch_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._policies = policies
        self._record = record
        self._device = device
        self._ceilings = ceilings
        self._log = log
        self._exhaustion = exhaustion
        self._batch_timeout_s = batch_timeout_s
        self._clock = clock
        self._batches = 0

    def run(self, batch: Batch, samples: list[Any]) -> tuple[Done, bool]:
        """Run a batch; return its outputs, and whether it went well at the first try.

        Raises:
            StickyFault: the process must be replaced. The board still names the whole batch.
        """
        model = self._models[batch.key[0]]
        self._batches += 1
        started_at = self._clock()
        outputs, fault = self._try(model, samples, batch.tickets)
        if fault is None:
            forward_s = self._clock() - started_at
            self._record.ran(batch.rows)
            if self._ceilings.succeeded(batch.key, batch.rows, most=self._policies[batch.key[0]].max_batch):
                self._log.event.info(
                    "batch_ceiling_raised", model=model.spec.name, bucket=batch.key[1], limit=self._ceilings.limit(batch.key)
                )
            return Done(batch, outputs, started_at, forward_s, self._batches), True
        outputs = self._split(model, batch, samples, fault)
        self._record.ran(batch.rows)  # work it was all the same
        return Done(batch, outputs, started_at, self._clock() - started_at, self._batches), False

    def _try(self, model: Model, samples: list[Any], tickets: Sequence[int]) -> tuple[Sequence[Any], Fault | None]:
        """One forward. When this returns a fault, the exception and its frames, which hold tensors, are gone already."""
        self._record.running(tickets, self._batch_timeout_s)
        self._device.brace()
        expected = len(samples)
        try:
            with inference_mode():
                outputs = model.forward(list(samples))
                self._device.synchronize()
                return check_outputs(outputs, expected, self._device.to_host), None
        except ContractError as e:
            return (), Fault(FaultKind.CONTRACT, Failure(ErrorCode.MODEL_ERROR, str(e)), "ContractError", "forward")
        except BaseException as e:  # the border to the user's model; SystemExit must not end the worker either
            self._device.relieve()
            try:
                return (), read_fault(e)
            except MemoryError:  # its frames still hold everything
                return (), _TOO_FULL_TO_SAY

    def _split(self, model: Model, batch: Batch, samples: list[Any], fault: Fault) -> list[Any]:
        """Find out which samples fail by themselves, after the whole batch has failed with `fault`."""
        outputs: list[Any] = [None] * len(samples)
        owners = [share.item.ticket for share in batch.shares for _ in range(share.stop - share.start)]
        start, stop = 0, len(samples)
        well = [False] * len(samples)
        untried: list[tuple[int, int]] = []
        too_large: list[tuple[int, int]] = []
        failed: Counter[tuple[str, str, str, str | None]] = Counter()
        problem: Fault | None = fault
        while problem is not None:
            self._record.error(problem.kind)
            if problem.kind is FaultKind.STICKY:
                self._record.running(batch.tickets, self._batch_timeout_s)
                raise StickyFault(f"{problem.error} at {problem.where}, in forward")
            if problem.kind is FaultKind.OUT_OF_MEMORY:
                if not too_large:
                    self._device.release()
                too_large.append((start, stop))
            if stop - start == 1 or problem.kind is FaultKind.CONTRACT:
                outputs[start:stop] = [problem.failure] * (stop - start)
                words = problem.failure.message if problem.kind is FaultKind.CONTRACT else None
                failed[str(problem.failure.code), problem.error, problem.where, words] += stop - start
            else:
                middle = (start + stop + 1) // 2
                untried += [(middle, stop), (start, middle)]
            problem = None
            while untried and problem is None:
                start, stop = untried.pop()
                if any(e - s <= stop - start and all(well[s:e]) for s, e in too_large):
                    # Fewer did not fit, though each of them does: so many will not either.
                    middle = (start + stop + 1) // 2
                    untried += [(middle, stop), (start, middle)]
                    continue
                part, problem = self._try(model, samples[start:stop], list(dict.fromkeys(owners[start:stop])))
                if problem is None:
                    outputs[start:stop], well[start:stop] = part, [True] * (stop - start)
                    self._ceilings.succeeded(batch.key, stop - start, most=self._policies[batch.key[0]].max_batch)
        if too_large:
            self._learn(model, batch, too_large, outputs)
            now = self._clock()
            self._exhaustion.failed(len(too_large), now)
            if self._exhaustion.overdue(now):
                self._exhaustion.judge(self._device.at_rest(), now)
        for (code, error, where, words), count in failed.items():
            # By class and place: an exception's own words may quote the client's data and go to the client only.
            self._log.event.warning(
                "model_failed", model=model.spec.name, code=code, error=error, where=where, samples=count, batch_size=batch.rows,
                **({"detail": words} if words else {}),
            )  # fmt: skip
        return outputs

    def _learn(self, model: Model, batch: Batch, too_large: list[tuple[int, int]], outputs: list[Any]) -> None:
        """Lower the ceiling for what did not fit, unless it held a sample that does not fit even alone: that one explains it."""
        for start, stop in too_large:
            if stop - start > 1 and not any(
                type(o) is Failure and o.code is ErrorCode.OUT_OF_MEMORY for o in outputs[start:stop]
            ):
                before = self._ceilings.limit(batch.key)
                limit = self._ceilings.failed(batch.key, stop - start)
                if limit != before:
                    self._log.event.warning(
                        "batch_ceiling_lowered", model=model.spec.name, bucket=batch.key[1], failed_at=stop - start, limit=limit
                    )
