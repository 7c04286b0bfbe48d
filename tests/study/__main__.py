"""`python -m study` (with tests/ on the path): ways to batch compared in virtual time; prints a table, `--write` puts it into the docs.

The batcher is the real one; arrivals and the device are numbers. A run is exact for its seeds: the same on every machine.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Final

from study.chart import chart
from study.simulate import LARGE, POLICIES, SMALL, Cost, Outcome, Policy, run
from study.workloads import Arrivals, bursty, diurnal, poisson

_DOCS: Final = Path(__file__).parents[2] / "docs"
#: Between these lines of docs/batching.md stands the table.
_BEGIN, _END = "<!-- study: begin -->", "<!-- study: end -->"
CLIENTS: Final = (1, 3, 6, 12, 24, 40)
CHARTED: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SEED: Final = 11


def workloads(seconds: float) -> dict[str, Arrivals]:
    """Arrivals that come whatever the pool does, by name."""
    found = {f"Poisson, {rate}/s": poisson(rate, seconds, SEED) for rate in (20, 200, 800, 1600)}
    found["bursts of 0.1 s, 100/s"] = bursty(100, seconds, SEED)
    found["bursts of 0.1 s, 600/s"] = bursty(600, seconds, SEED)
    found["a day, 20 to 1,600/s"] = diurnal(800, seconds, SEED)
    return found


def table(cost: Cost, seconds: float) -> str:
    """Every policy with every workload."""
    lines = [
        f"A batch of n takes {cost}:",
        "",
        f"| arrivals | {' | '.join(p.name for p in POLICIES)} |",
        f"| --- |{' ---: |' * len(POLICIES)}",
    ]
    for name, arrivals in workloads(seconds).items():
        lines.append(f"| {name} | {' | '.join(_cell(run(policy, cost, arrivals)) for policy in POLICIES)} |")
    for clients in CLIENTS:
        cells = [_cell(_closed(p, cost, clients, seconds), rate=True) for p in POLICIES]
        lines.append(f"| {clients} clients, each asks again when answered | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(seconds: float) -> str:
    """Answers a second over the number of clients that ask again when answered."""
    rates = {p.name: [_closed(p, LARGE, clients, seconds).per_s for clients in CHARTED] for p in POLICIES}
    return chart(
        f"Clients that ask again when answered; a batch of n takes {LARGE}", "clients", "answers a second", CHARTED, rates
    )


def _closed(policy: Policy, cost: Cost, clients: int, seconds: float) -> Outcome:
    return run(policy, cost, [0.0001 * n for n in range(clients)], again_until=seconds)


def _cell(outcome: Outcome, *, rate: bool = False) -> str:
    last = f"{outcome.per_s:,.0f}/s" if rate else f"{100 * outcome.busy:.0f} %"
    return f"{outcome.ms(0.5):.1f} / {outcome.ms(0.99):.1f} / {outcome.mean_batch:.1f} / {last}"


def main() -> int:
    """Print, or write."""
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of virtual time for each workload (60)")
    parser.add_argument("--write", action="store_true", help="into docs/batching.md and docs/batching.svg")
    options = parser.parse_args()
    found = "\n\n".join(table(cost, options.seconds) for cost in (LARGE, SMALL))
    print(found)
    if options.write:
        page = _DOCS / "batching.md"
        page.write_text(re.sub(f"(?s){_BEGIN}.*{_END}", f"{_BEGIN}\n\n{found}\n\n{_END}", page.read_text()))
        (_DOCS / "batching.svg").write_text(figure(options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
