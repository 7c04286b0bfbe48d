"""`python -m soak [--seconds S] [--seed N] [--router-kills]` (with tests/ on the path): a pool under mixed load while it is disturbed.

Prints what every kind of client saw; exit code 1 when anything was not as promised. `make soak SECONDS=60` does the same.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from soak.session import WORKERS, Outcome, soak


def main() -> int:
    """Run one soak and print it."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long clients send (180)")
    parser.add_argument("--seed", type=int, default=None, help="of clients and disturbances (random, and printed)")
    parser.add_argument(
        "--router-kills", action="store_true", help="kill the router too; only the library's callers are judged"
    )
    options = parser.parse_args()
    seed = random.randrange(10_000) if options.seed is None else options.seed
    print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the start; {WORKERS} workers, {options.seconds:g} s, --seed {seed}\n"
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpupool-soak-") as folder:
        outcome = soak(Path(folder), seconds=options.seconds, seed=seed, router_kills=options.router_kills)
    print(table(outcome))
    print(f"\n{time.monotonic() - began:.0f} s")
    return 1 if outcome.violations else 0


def table(outcome: Outcome) -> str:
    """What was seen, as Markdown."""
    lines = ["| clients | sent | missing | codes | p50 / p99 of ok, ms |", "| --- | ---: | ---: | --- | ---: |"]
    for kind, ledger in sorted(outcome.ledgers.items()):
        codes = ", ".join(f"{code} {count:,}" for code, count in ledger.codes.most_common())
        latency = f"{ledger.percentile_ms(0.5)} / {ledger.percentile_ms(0.99)}"
        lines.append(f"| {kind} | {ledger.sent:,} | {ledger.missing} | {codes} | {latency} |")
    lines += ["", "| disturbance | times |", "| --- | ---: |"]
    lines += [f"| {name} | {count} |" for name, count in sorted(outcome.disturbed.items())]
    lines.append(f"| SIGKILL to a client with requests open | {outcome.killed_clients} |")
    watch, router = outcome.watch, outcome.router
    ready = ", ".join(f"{count} with {number} ready" for number, count in sorted(watch.live.items()))
    lines += [
        "",
        "| what | figure |",
        "| --- | --- |",
        f"| samples of the books | {watch.samples}: {ready}; {watch.stale} with old books |",
    ]
    lines.append(f"| slowest answer to `status`, command included | {1000 * watch.slowest_s:.0f} ms |")
    for name, memory in outcome.memory.items():
        told = f"{memory.first:.1f}, {memory.middle:.1f}, {memory.last:.1f}; peak {memory.peak:.1f}; may grow by {memory.allowed:.1f}"
        lines.append(f"| RSS of the {name} by thirds, MiB | {told} |")
    for key in (
        "restarts",
        "accepted_total",
        "replied_total",
        "undeliverable_total",
        "late_results_total",
        "redispatched_total",
    ):
        lines.append(f"| router: {key.replace('_', ' ')} | {router.get(key)} |")
    lines.append("")
    if outcome.violations:
        lines += ["## Broken promises", "", *(f"- {count} x {words}" for words, count in outcome.violations.most_common())]
    else:
        lines.append("No promise was broken.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
