"""More work than one worker can do, with and without an extra CPU worker for overflow: who is refused, and who did the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from demonstrations.finding import Finding, above, below, equal, told
from support.running import Load, RunningPool

#: A batch of 4 takes 0.1 s: 40 requests a second, of 70.
OPTIONS: Final = "fixed_s = 0.1"
_RATE: Final = 70.0
CONFIG: Final = "[batching]\nmax_batch = 4\nmin_batch = 4\n[router]\nmax_pending = 40\n"


@dataclass(frozen=True)
class Seen:
    """What came of one load."""

    codes: Counter[str]
    by_worker: Counter[int]  # good replies
    marked: Counter[int]  # replies with the mark, by worker
    books: dict[str, Any]
    calm: Counter[str]  # answers to a few requests in turn afterwards, by whether they were marked

    @property
    def refused(self) -> float:
        """The share that was refused, in percent."""
        return 100 * self.codes["overloaded"] / self.codes.total()


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Load both pools for half of the time each."""
    without, beside = (_load(folder / str(count), count, seconds / 2) for count in (0, 1))
    return [
        told("requests a second offered; one worker can do", f"{_RATE:.0f}; 40"),
        told("answers without overflow", dict(without.codes)),
        told("answers with one overflow worker", dict(beside.codes)),
        equal("other codes", sorted({*without.codes, *beside.codes} - {"ok", "overloaded"}), []),
        told("refused without, with", f"{without.refused:.0f} %, {beside.refused:.0f} %"),
        below("refused with it, of refused without", beside.refused / without.refused, 0.8, "", timed=True),
        above("refused without it: the pool was saturated", without.refused, 10.0, "%", timed=True),
        above("good replies of the overflow worker", beside.by_worker[1], 1, ""),
        equal("marked replies, by worker", dict(beside.marked), {1: beside.by_worker[1]}),
        equal("marked without overflow workers", dict(without.marked), {}),
        told("good replies of the main worker, without and with", f"{without.by_worker[0]}, {beside.by_worker[0]}"),
        equal("requests sent to it, by the books", beside.books["overflowed_total"], beside.by_worker[1]),
        equal("afterwards, one request after the other", dict(beside.calm), {"ok, by the main worker": 10}),
    ]


def _load(folder: Path, overflow: int, seconds: float) -> Seen:
    folder.mkdir()
    with RunningPool(folder, "paced_model:Paced", workers=1, options=OPTIONS, config=CONFIG) as pool:
        pool.file.write_text(pool.file.read_text().replace("[pool]\n", f"[pool]\ncpu_overflow = {overflow}\n"))
        pool.start()
        pool.wait(lambda s: s["pool"]["overflow_ready"] == overflow)
        load = Load(pool, rate=_RATE, sample={"n": 1})
        load.wait_for(int(_RATE * seconds), within=60 + 2 * seconds)
        codes = load.stop()
        books = pool.wait(lambda s: not s["router"]["pressure"])["router"]
        with pool.client() as client:
            calm = [client.call({"n": 1})[0] for _ in range(10)]
        replies = load.replies.values()
        return Seen(
            codes,
            Counter(r["worker"] for r in replies if r["code"] == "ok"),
            Counter(r["worker"] for r in replies if r.get("overflow")),
            books,
            Counter(f"{r['code']}, by the {'overflow' if r.get('overflow') else 'main'} worker" for r in calm),
        )
