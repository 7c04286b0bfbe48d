"""The configured rules that the pool decides by, all in one value that a reload can replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .capacity import DegradeRule
from .liveness import LivenessPolicy
from .restart import RestartPolicy


@dataclass(frozen=True, slots=True)
class Policy:
    """See the configuration's tables [pool], [supervision] and [[degrade]]."""

    restart: RestartPolicy
    liveness: LivenessPolicy
    degrade: Sequence[DegradeRule] = ()
    min_ready: int = 1
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0
    recycle_on_leak: bool = False
    recycle_after_batches: int = 0  # 0: never
