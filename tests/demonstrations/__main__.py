"""`python -m demonstrations NAME …` (with tests/ on the path): one promise each, shown on a real pool, as a table of figures and bounds.

Exit code 1 when a bound was broken. Bounds are ratios within the run, or times generous enough for a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from demonstrations import (
    alarms,
    batching,
    buckets,
    diagnosis,
    fairness,
    fast_fail,
    growth,
    held_bytes,
    leak,
    leak_watch,
    logging,
    low_high,
    memory,
    objective,
    overflow,
    overload,
    poison,
    router_kill,
    scrapes,
    threads,
    unequal,
)
from demonstrations.finding import Finding, broken, table

Show = Callable[[Path, float], Sequence[Finding]]
#: Name, what shows it, and how many seconds that takes in full and in brief.
ALL: Final[dict[str, tuple[Show, float, float]]] = {
    "poison": (poison.show, 6.0, 3.0),
    "overload": (overload.show, 30.0, 5.0),
    "held-bytes": (held_bytes.show, 6.0, 6.0),
    "fairness": (fairness.show, 40.0, 16.0),
    "unequal": (unequal.show, 36.0, 9.0),
    "router-kill": (router_kill.show, 20.0, 4.0),
    "memory": (memory.show, 30.0, 5.0),
    "fast-fail": (fast_fail.show, 30.0, 5.0),
    "leak": (leak.show, 45.0, 15.0),
    "leak-watch": (leak_watch.show, 300.0, 5.0),
    "overflow": (overflow.show, 30.0, 12.0),
    "growth": (growth.show, 100.0, 8.0),
    "low-high": (low_high.show, 30.0, 5.0),
    "batching": (batching.show, 24.0, 6.0),
    "buckets": (buckets.show, 40.0, 8.0),
    "threads": (threads.show, 48.0, 12.0),
    "objective": (objective.show, 40.0, 16.0),
    "alarms": (alarms.show, 130.0, 20.0),
    "diagnosis": (diagnosis.show, 120.0, 20.0),
    "scrapes": (scrapes.show, 100.0, 5.0),
    "logging": (logging.show, 90.0, 20.0),
}


def main() -> int:
    """Show what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m demonstrations", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ALL, []], metavar="NAME", help=f"{', '.join(ALL)}; default: all")
    parser.add_argument("--brief", action="store_true", help="shorter, and less exact")
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the start")
    failed = []
    for name in options.names or ALL:
        show, full, brief = ALL[name]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpupool-show-") as folder:
            findings = show(Path(folder), brief if options.brief else full)
        print(f"\n## {name}\n\n{str(sys.modules[show.__module__].__doc__).splitlines()[0]}\n\n{table(findings)}")
        print(f"\n{time.monotonic() - began:.0f} s", flush=True)
        failed += [name] if broken(findings) else []
    if failed:
        print(f"\nBounds were broken: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
