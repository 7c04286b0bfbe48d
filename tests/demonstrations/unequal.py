"""Two workers, one three times slower: who gets how much, and what that does to the slowest requests, beside taking turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from demonstrations import load
from demonstrations.finding import Finding, below, equal, told
from demonstrations.load import Job, Seen
from support.running import RunningPool

SLOWER: Final = 3.0
#: Fewer than both workers have room for: else whoever becomes free takes the next one, and every policy looks good.
_OPEN: Final = 12
_ROUNDS: Final = 2
CONFIG: Final = '[batching]\nmax_batch = 8\nmin_batch = 1\n[router]\npolicy = "shortest_wait"\n'


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Alternate between the policies on one pool; the first round of each is for learning."""
    roles = folder / "roles"
    roles.mkdir()
    options = f'each_s = 0.005, roles = "{roles}", factors = [1.0, {SLOWER}]'
    with RunningPool(folder, "paced_model:Paced", options=options, config=CONFIG) as pool:
        pool.start()
        by_policy: dict[str, Seen] = {}
        for turn in range(1 + _ROUNDS):
            for policy in ("shortest_wait", "round_robin"):
                pool.file.write_text(pool.file.read_text().replace("shortest_wait", policy).replace("round_robin", policy))
                assert pool.ask("reload")["ok"]
                seen = load.run(Job(load.endpoint(pool), seconds / (2 + 2 * _ROUNDS), open=_OPEN))
                if turn:
                    by_policy[policy] = by_policy.get(policy, Seen()).merge(seen)
        wait, turns = by_policy["shortest_wait"], by_policy["round_robin"]
        p99 = {policy: 1000 * load.percentile(seen.latencies["ok"], 0.99) for policy, seen in by_policy.items()}
        return [
            equal("answers", dict(wait.codes + turns.codes), {"ok": wait.sent + turns.sent}),
            told("requests by worker, shortest wait", wait.by_worker),
            told("requests by worker, in turn", turns.by_worker),
            below(
                "share of the faster to the slower, off 3:1 by",
                100 * abs(_ratio(wait.by_worker) / SLOWER - 1),
                15,
                "%",
                timed=True,
            ),
            told("the same in turn", f"{_ratio(turns.by_worker):.2f}:1"),
            below("p99 by shortest wait, of p99 in turn", p99["shortest_wait"] / p99["round_robin"], 1.0, ""),
            told("p99 by shortest wait, in turn", f"{p99['shortest_wait']:.0f} ms, {p99['round_robin']:.0f} ms"),
            told("requests done, shortest wait and in turn", f"{wait.sent}, {turns.sent}"),
        ]


def _ratio(by_worker: dict[str, int]) -> float:
    most, *rest = (count for _, count in Counter(by_worker).most_common())
    return most / rest[0] if rest else float("inf")
