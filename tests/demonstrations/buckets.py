"""Texts of 16 to 256 tokens and MiniLM: how much of what runs is padding, and how many texts a second, with length buckets and without."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgpack

from demonstrations import load
from demonstrations.finding import Finding, below, equal, told
from demonstrations.load import Job
from gpupool.demo import model_directory
from support import noted_models
from support.running import RunningPool

BOUNDS: Final = "[32, 64, 128, 256]"
_TEXTS: Final = 512
_SHORTEST, _LONGEST = 16, 256
_OPEN: Final = 48
_ROUNDS: Final = 2
_BRIEF_S: Final = 20.0  # with less there is one round: each has to finish what it has begun


def show(folder: Path, seconds: float) -> Sequence[Finding]:
    """Take turns between the two on one pool."""
    rounds = _ROUNDS if seconds >= _BRIEF_S else 1
    rng = random.Random(3)
    # Two tokens are the text's frame. Lengths are spread evenly over their logarithm, as those of real texts rather are.
    lengths = [int(_SHORTEST * (_LONGEST / _SHORTEST) ** rng.random()) for _ in range(_TEXTS)]
    bodies = tuple(msgpack.packb({"text": "word " * (n - 2)}).hex() for n in lengths)
    manifest = json.loads((model_directory() / "manifest.json").read_text())
    sums = ", ".join(f'"{name}" = "{digest}"' for name, digest in manifest.get("options", {}).get("sha256", {}).items())
    options = f'notes = "{folder / "notes"}", sha256 = {{ {sums} }}'
    config = f"[batching]\nmax_batch = 16\nlength_buckets = {BOUNDS}\n"
    found: dict[bool, list[float]] = {True: [0.0] * 4, False: [0.0] * 4}
    borrowed = failed = 0
    with RunningPool(folder, "noted_models:MiniLM", workers=1, options=options, config=config) as pool:
        pool.start()
        for turn in range(1 + rounds):
            for on in (True, False):
                text = pool.file.read_text()
                bounds = BOUNDS if on else "[]"
                pool.file.write_text(
                    text.replace(f"length_buckets = {'[]' if on else BOUNDS}\n", f"length_buckets = {bounds}\n")
                )
                assert pool.ask("reload")["ok"]
                known = len(noted_models.read(folder / "notes"))
                each_s = seconds / (2 + 2 * rounds)
                seen = load.run(Job(load.endpoint(pool), each_s, open=_OPEN, bodies=bodies, timeouts_ms=(300_000,)))
                failed += sum(seen.codes.values()) - seen.codes["ok"]
                if on:
                    told_ = pool.wait(lambda s: "batching" in s["workers"][0])["workers"][0]["batching"]["groups"]
                    borrowed = max(borrowed, sum(group["borrowed_rows"] for group in told_))
                if turn:  # the first of each is for learning
                    notes = noted_models.read(folder / "notes")[known:]
                    values = (sum(n.rows for n in notes), sum(n.ended - n.began for n in notes), sum(n.units for n in notes))
                    sums_ = (*values, sum(n.padded for n in notes))
                    found[on] = [x + y for x, y in zip(found[on], sums_, strict=True)]
    per_s = {on: rows / busy_s for on, (rows, busy_s, _, _) in found.items()}
    padding = {on: padded / units - 1 for on, (_, _, units, padded) in found.items()}
    return [
        equal("answers other than ok", failed, 0),
        told("texts run, on and off", f"{found[True][0]:.0f}, {found[False][0]:.0f}"),
        told("padding for each token, on and off", f"{padding[True]:.2f}, {padding[False]:.2f}"),
        below("padding with buckets, of that without", padding[True] / padding[False], 0.5, ""),
        told("texts a second of forward, on and off", f"{per_s[True]:.1f}, {per_s[False]:.1f}"),
        told("ratio", f"{per_s[True] / per_s[False]:.2f}"),
        told("rows that filled up batches of longer ones", borrowed),
    ]
