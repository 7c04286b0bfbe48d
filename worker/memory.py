"""This worker's memory from loading to the last batch: measure, plan, reserve, and tell.

The plan is measured once; what it allows follows the budget, which a reload may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from gpupool.logs import Log
from gpupool.spec import MemorySpec

from .budget import NotMeasurable
from .ceiling import Ceilings
from .device import Device
from .exhaustion import Exhaustion
from .faults import FaultKind, StickyFault, read_fault
from .measure import measure_model
from .models import Model, Prepared
from .plan import MemoryPlan, told

#: Groups in one report: a message has a bound, and models may have 64 buckets each.
_MOST_TOLD: Final = 128

#: The share of the emptying threshold that the pool may fill.
_BELOW: Final = 0.95


class Memory:
    """The plan in force.

    Args:
        device: whose memory it is.
        ceilings: what follows from the plan for batches, and what batches have taught.
        exhaustion: the count of failures.
        spec: the settings of [memory].
    """

    def __init__(self, device: Device, ceilings: Ceilings, exhaustion: Exhaustion, spec: MemorySpec, log: Log) -> None:
        self._device = device
        self._ceilings = ceilings
        self._exhaustion = exhaustion
        self._spec = spec
        self._log = log
        self._plan: MemoryPlan | None = None
        self._names: list[str] = []
        self.loaded_bytes = 0  # at rest, when everything was loaded and warm
        self._pool_bytes = 0

    def measure(
        self,
        models: Sequence[Model],
        warm: Sequence[Sequence[Prepared]],
        check: Callable[[Any, int], Sequence[Any]],
        progress: Callable[[], None],
    ) -> None:
        """Measure every model by its warm-up samples, put the plan into force, and reserve the pool.

        Without a budget (a CPU without `memory.cpu_limit_bytes`), or for a model without warm-up samples, there is no plan: the first batch that
        does not fit teaches the ceiling.
        """
        budget = self._device.budget
        self._names = [m.spec.name for m in models]
        self._device.release()
        self.loaded_bytes = self._device.at_rest()
        limit = budget.limit()
        self._exhaustion.begin(fixed_bytes=self.loaded_bytes, budget_bytes=lambda: budget.limit() or self._device.host.total())
        if limit is None:
            return
        self._device.brace()
        fixed = budget.fixed()
        groups = {}
        for number, (model, prepared) in enumerate(zip(models, warm, strict=True)):
            reason = "" if prepared else "it has no warm-up samples"
            try:
                found = measure_model(number, model, prepared, budget, room_bytes=limit - fixed, check=check, progress=progress)
            except NotMeasurable as e:
                found, reason = {}, str(e)
            except (
                BaseException
            ) as e:  # the border to the user's model: one that does not bear these batches works without a plan
                fault = read_fault(e)
                if fault.kind is FaultKind.STICKY:
                    raise StickyFault(f"{fault.error} at {fault.where}, in a batch of warm-up samples") from None
                found, reason = {}, f"{fault.error} at {fault.where}, in a batch of its warm-up samples"
            if reason:
                self._log.event.info("memory_not_planned", model=model.spec.name, reason=reason)
            groups.update(found)
        self._device.release()
        self._device.brace()
        self._plan = MemoryPlan(fixed, groups)
        self._put_into_force("measured")
        self._reserve(models, limit)

    def settings(self, spec: MemorySpec) -> None:
        """Take over changed settings (from the link's thread): the limit at once, the ceilings from the next batch on."""
        changed = spec != self._spec
        self._spec = spec
        self._device.limit(spec)
        if changed:
            self._put_into_force("reloaded")

    def _put_into_force(self, why: str) -> None:
        with self._ceilings.writing:  # a reload may come while models are measured: the newer budget's plan stays
            limit, plan = self._device.budget.limit(), self._plan
            ceilings = plan.ceilings(limit) if plan is not None and limit is not None else {}
            self._ceilings.plan(ceilings, self._spec.start_fraction)
            if plan is not None:
                self._log.event.info(
                    "memory_planned", why=why, budget_bytes=limit, fixed_bytes=plan.fixed_bytes, groups=self._told(limit)
                )

    def _reserve(self, models: Sequence[Model], limit: int) -> None:
        card = self._device.card
        if card is None or self._plan is None:
            return
        ceilings = self._plan.ceilings(limit)
        most = {key: min(n, models[key[0]].spec.batching.max_batch) for key, n in ceilings.items()}
        try:
            # Below the threshold from which cached memory is given back, or the pool would be the first to go.
            self._pool_bytes = self._plan.pool_bytes(most, int(_BELOW * self._spec.empty_cache_above * limit))
            held = card.reserve(self._pool_bytes)
        except Exception as e:  # a pool is a gain, not a condition
            self._pool_bytes = 0
            self._log.event.warning("memory_pool_not_reserved", error=read_fault(e).error)
        else:
            self._log.event.info("memory_pool_reserved", pool_bytes=self._pool_bytes, held_bytes=held)

    def report(self) -> dict[str, Any]:
        """Say how memory stands, for status and metrics; called from the beat's thread."""
        budget, plan = self._device.budget, self._plan
        limit, used = budget.limit(), budget.used()
        about: dict[str, Any] = {
            **self._device.memory(), "budget_bytes": limit, "used_bytes": used, "loaded_bytes": self.loaded_bytes,
            "failures": self._exhaustion.failures,
        }  # fmt: skip
        if self._pool_bytes and plan is not None:
            about |= {"pool_bytes": self._pool_bytes, "pool_used_bytes": max(0, used - plan.fixed_bytes)}
        limits = self._ceilings.limits()
        if plan is not None:
            about["plan"] = self._told(limit)
        return about | {
            "ceilings": [
                {"model": self._names[key[0]], "bucket": key[1], "limit": n} for key, n in sorted(limits.items())[:_MOST_TOLD]
            ]
        }

    def _told(self, limit: int | None) -> list[dict[str, Any]]:
        assert self._plan is not None
        return told(self._plan, limit, self._names, self._ceilings.limits())[:_MOST_TOLD]
