"""A worker that fails at once beside one that works: always free, it would draw all traffic. It is taken out after five failures in a row.

Failures that were on their way when the fifth was counted come on top: no more than clients have requests open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from demonstrations import load
from demonstrations.finding import Finding, above, below, equal, told
from demonstrations.load import Job
from support.running import RunningPool

_CLIENTS: Final = 4
_MOST_IN_A_ROW: Final = 5


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Let four clients ask, each one request after the other."""
    roles = folder / "roles"
    roles.mkdir()
    options = f'fixed_s = 0.1, roles = "{roles}", broken = [0]'
    with RunningPool(folder, "paced_model:Paced", options=options) as pool:
        pool.start()
        seen = load.run(Job(load.endpoint(pool), seconds, connections=_CLIENTS, open=_CLIENTS))
        sick = pool.records("worker_sick")
        failed = Counter(str(worker) for _, code, worker in seen.order if code == "internal")
        late = [code for at, code, _ in seen.order if at > 1.0]
        # Every process of the broken slot that got work was taken out, and none answered more than the rest in flight after that.
        bound = (_MOST_IN_A_ROW + _CLIENTS - 1) * max(1, len(sick))
        return [
            equal("answers", sorted(seen.codes), ["internal", "ok"]),
            above("times that the broken worker was taken out", len(sick), 1, ""),
            equal("reason each time", sorted({r["reason"] for r in sick}), [f"{_MOST_IN_A_ROW} internal errors in a row"]),
            below(f"`internal` in all, {_MOST_IN_A_ROW} each time and those on their way", failed.total(), bound, ""),
            equal("workers that failed", len(failed), 1),
            below("errors after the first second", 100 * sum(c != "ok" for c in late) / max(1, len(late)), 5, "%", timed=True),
            told(
                "ok, `internal`, requests a second",
                f"{seen.codes['ok']}, {seen.codes['internal']}, {seen.ok_per_s(0, seconds):.0f}",
            ),
        ]
