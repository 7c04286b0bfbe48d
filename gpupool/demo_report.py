"""What a run of requests cost, summed up from their replies and the pool's log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpupool.client import Reply

if TYPE_CHECKING:
    from rich.table import Table


def batch_sizes(lines: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Count the batches of each size from the pool's request lines: a batch of n shows in n of them."""
    requests: dict[int, int] = {}
    for line in lines:
        size = line.get("batch_size")
        if line.get("event") == "request" and isinstance(size, int) and size > 0:
            requests[size] = requests.get(size, 0) + 1
    return {size: max(1, round(count / size)) for size, count in requests.items()}


def make_report(replies: Sequence[Reply], seconds: float, sizes: dict[int, int]) -> dict[str, Any]:
    """Sum up what a run cost. `sizes`: how many batches there were of each size."""
    totals = sorted(r.timings_ms.get("total", 0.0) for r in replies)
    stages = [
        s for s in ("pending", "queue", "preprocess", "forward", "postprocess") if any(s in r.timings_ms for r in replies)
    ]
    by_worker: dict[str, int] = {}
    for reply in replies:
        by_worker[str(reply.worker)] = by_worker.get(str(reply.worker), 0) + 1
    batches = sum(sizes.values())
    return {
        "requests": len(replies),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(replies) / seconds, 1),
        "latency_ms": {f"p{p}": round(percentile(totals, p), 2) for p in (50, 95, 99)},
        "batch": {
            "mean": round(sum(n * count for n, count in sizes.items()) / batches, 2) if batches else None,
            "sizes": {str(n): sizes[n] for n in sorted(sizes)},
        },
        "workers": dict(sorted(by_worker.items())),
        "stages_ms": {s: round(sum(r.timings_ms.get(s, 0.0) for r in replies) / len(replies), 3) for s in stages},
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value with at least so many percent of all values at or below it; `ordered` must be sorted and not empty."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def table_of(report: dict[str, Any]) -> Table:
    """Arrange a report for people."""
    from rich.table import Table

    table = Table(title="What it cost", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    latency, batch = report["latency_ms"], report["batch"]
    table.add_row("requests", f"{report['requests']} in {report['seconds']:.2f} s: {report['requests_per_s']:g} a second")
    table.add_row("in the pool", ", ".join(f"{name} {value:.1f} ms" for name, value in latency.items()))
    table.add_row("mean time of", ", ".join(f"{name} {value:.2f} ms" for name, value in report["stages_ms"].items()))
    if batch["mean"] is not None:
        sizes = ", ".join(f"{count}x{size}" for size, count in batch["sizes"].items())
        table.add_row("batches", f"mean {batch['mean']:.1f} samples; count x size: {sizes}")
    shares = (
        f"worker {number}: {count} ({100 * count / report['requests']:.0f} %)" for number, count in report["workers"].items()
    )
    table.add_row("shares", ", ".join(shares))
    return table
