"""Has what was asked for come true? Decided from status documents alone. Pure.

A command gives its order, which the pool carries out whoever watches, and then looks at the status until each worker is settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Nothing is left to drain in these.
_WITHOUT_WORK: Final = frozenset({"drained", "stopped", "parked", "lost", "quarantined", "unkillable"})
#: A worker does not get out of these by itself, or not soon.
_STRANDED: Final = frozenset({"parked", "quarantined", "lost", "unkillable", "stopped"})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an order is: workers that still move, and what went wrong with those that will not arrive."""

    waiting: tuple[int, ...]
    problems: tuple[str, ...]
    workers: tuple[dict[str, Any], ...]

    @property
    def settled(self) -> bool:
        """Whether waiting on changes nothing."""
        return not self.waiting


def drain_progress(document: Mapping[str, Any], ordered: Mapping[int, int], seen_draining: set[int]) -> Progress:
    """Judge a drain of the workers in `ordered`; a worker that drained and is ready again was resumed by someone.

    `seen_draining` is the caller's memory between two looks, and is updated.
    """
    waiting, problems, workers = [], _gone(document, ordered), []
    for worker in _those(document, ordered):
        number, state = worker["worker"], worker["state"]
        workers.append(_brief(worker))
        if state in _WITHOUT_WORK:
            continue
        if state == "draining":
            seen_draining.add(number)
        if state == "ready" and number in seen_draining:
            problems.append(f"worker {number} was resumed before it had drained")
        else:
            waiting.append(number)
    return Progress(tuple(waiting), tuple(problems), tuple(workers))


def restart_progress(document: Mapping[str, Any], ordered: Mapping[int, int]) -> Progress:
    """Judge a restart; `ordered` has the incarnation that each worker had when the order was given.

    The next incarnation must get ready. One that failed shows as backing off, or already as the one after it.
    """
    waiting, problems, workers = [], _gone(document, ordered), []
    for worker in _those(document, ordered):
        number, state, incarnation = worker["worker"], worker["state"], worker.get("incarnation", 0)
        workers.append(_brief(worker))
        started = incarnation - ordered[number]
        if started >= 1 and state in {"ready", "draining", "drained"}:
            continue
        if state in _STRANDED or (started >= 1 and state == "backing_off") or started > 1:
            whys = [f"{key.replace('_', ' ')}: {text_of(worker[key])}" for key in ("reason", "last_exit") if worker.get(key)]
            problems.append("; ".join([f"worker {number} did not get ready: it is {state}", *whys]))
        else:
            waiting.append(number)
    return Progress(tuple(waiting), tuple(problems), tuple(workers))


def release_progress(document: Mapping[str, Any], ordered: Mapping[int, int]) -> Progress:
    """Judge a release of devices: no process may be left on them."""
    waiting, problems, workers = [], _gone(document, ordered), []
    for worker in _those(document, ordered):
        workers.append(_brief(worker))
        if worker["state"] == "unkillable":
            problems.append(f"worker {worker['worker']} does not end: process {worker.get('pid')} is stuck in the kernel")
        elif worker.get("pid") is not None or worker["device"].get("probe_pids"):
            waiting.append(worker["worker"])  # NVML holds every card open as long as a probe is there
    return Progress(tuple(waiting), tuple(problems), tuple(workers))


def _those(document: Mapping[str, Any], ordered: Mapping[int, int]) -> list[Mapping[str, Any]]:
    return [worker for worker in document["workers"] if worker["worker"] in ordered]


def _gone(document: Mapping[str, Any], ordered: Mapping[int, int]) -> list[str]:
    present = {worker["worker"] for worker in document["workers"]}
    return [f"worker {number} is no longer part of the pool" for number in ordered if number not in present]


def _brief(worker: Mapping[str, Any]) -> dict[str, Any]:
    return {key: worker.get(key) for key in ("worker", "incarnation", "state")}


def text_of(value: Any) -> str:
    """Put a worker's last exit into words: its cause, where the pool gave one."""
    if isinstance(value, Mapping):
        return str(value.get("cause") or ", ".join(f"{key} {item}" for key, item in value.items() if item is not None))
    return str(value)
