"""A model whose forward takes memory by batch and length, in a budget for 11 samples: planned, found by failing, and grown."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from demonstrations.finding import Finding, above, below, equal, told
from support.running import RunningPool

FITS: Final = 11
GROWN: Final = 22
LENGTH: Final = 16
_UNIT: Final = 1 << 20  # bytes for each unit of length
_MAX_BATCH: Final = 32
_OPEN: Final = 96
#: Nothing needs to be known to start with that much.
_AMPLE: Final = 1 << 30


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Run 1,000 requests with a plan and as many without; in brief a quarter of each."""
    brief = seconds < 10
    requests = 250 if brief else 1000
    folders = [folder / name for name in ("look", "planned", "found")]
    for each in folders:
        each.mkdir()
    with pool_in(folders[0], _AMPLE) as pool:
        plan = pool.start().worker(0)["memory"]
        fixed, each = told_fixed(pool), plan["plan"][0]["per_sample_bytes"]
    # Half a sample more than fits: page by page the same process never takes quite the same.
    budget, grown = (fixed + int((n + 0.5) * each) for n in (FITS, GROWN))
    findings = [told("a sample takes, by measurement", f"{each / 2**20:.2f} MiB of {LENGTH} MiB that it asks for")]

    with pool_in(folders[1], budget) as pool:
        pool.start()
        findings.append(told("planned at warm-up", pool.worker(0)["memory"]["plan"][0]))
        findings.append(
            below("planned ceiling, off the true one by", abs(pool.worker(0)["memory"]["plan"][0]["ceiling"] - FITS), 1, "")
        )
        codes, largest = serve(pool, requests)
        findings += served("with a plan", pool, codes, requests, failures=5)
        findings.append(above("with a plan: largest batch", largest, int(0.7 * FITS) if brief else FITS - 1, ""))
        codes, _ = serve(pool, 31, oversize=True)
        findings.append(equal("one sample that fits nowhere among 31 others", dict(codes), {"ok": 31, "out_of_memory": 1}))
        pool.file.write_text(re.sub(r"cpu_limit_bytes = \d+", f"cpu_limit_bytes = {grown}", pool.file.read_text()))
        assert pool.ask("reload")["ok"]
        codes, largest = serve(pool, requests)
        findings.append(equal("after the budget has grown: answers", dict(codes), {"ok": requests}))
        findings.append(above(f"after it has grown to {GROWN}: largest batch", largest, int(0.7 * GROWN), ""))

    with pool_in(folders[2], budget, warm="") as pool:
        pool.start()
        codes, largest = serve(pool, requests)
        findings += served("without warm-up samples", pool, codes, requests, failures=8)
        findings.append(above("without warm-up samples: largest batch that ran", largest, FITS // 2, ""))
    return findings


def pool_in(folder: Path, budget: int, warm: str = str(LENGTH)) -> RunningPool:
    """One worker, full batches, that budget."""
    config = f"""
[batching]
max_batch = {_MAX_BATCH}
min_batch = {_MAX_BATCH}
window_ms = 20.0
adaptive = false
[memory]
cpu_limit_bytes = {budget}
"""
    options = f"bytes_per_unit = {_UNIT}, warm = [{warm}]"
    return RunningPool(folder, "hungry_model:Hungry", workers=1, options=options, config=config)


def told_fixed(pool: RunningPool) -> int:
    """What the plan counts as held at rest."""
    fixed: int = pool.records("memory_planned")[0]["fixed_bytes"]
    return fixed


def serve(pool: RunningPool, count: int, *, oversize: bool = False) -> tuple[Counter[str], int]:
    """Keep some requests open until so many are answered; return their codes and the largest batch that went well."""
    codes: Counter[str] = Counter()
    largest = sent = answered = 0
    with pool.client() as client:
        if oversize:
            client.send({"length": 1 << 30})
            count, sent = count + 1, 1
        while answered < count:
            while sent < count and sent - answered < _OPEN:
                client.send({"length": LENGTH, "n": sent})
                sent += 1
            reply = client.receive(30.0)
            assert reply, f"{answered} of {count} answered: {json.dumps(pool.status())[:1000]}"
            answered += 1
            codes[reply[0]["code"]] += 1
            largest = max(largest, reply[1]["rows"] if reply[1] else 0)
    return codes, largest


def served(how: str, pool: RunningPool, codes: Counter[str], requests: int, *, failures: int) -> list[Finding]:
    """What must hold of 1,000 requests in either way."""
    lowered = [r["failed_at"] for r in pool.records("batch_ceiling_lowered")]
    # Each of them was told of in the log at once, and is counted in the next report.
    worker: dict[str, Any] = pool.wait(lambda s: s["workers"][0]["oom_total"] >= len(lowered))["workers"][0]
    return [
        equal(f"{how}: answers", dict(codes), {"ok": requests}),
        below(f"{how}: runs that did not fit", worker["oom_total"], failures, f"(sizes: {lowered})"),
        equal(f"{how}: processes", worker["incarnation"], 1),
    ]
