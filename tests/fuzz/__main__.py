"""`python -m fuzz [TARGET …] [--seconds S]` (with tests/ on the path): the fuzz targets for longer than the test suite has time for.

Guided by coverage where atheris is installed (it has wheels for some Pythons only), each target in a process of its own; else by hypothesis,
which draws from the protocol's grammar. Exit code 1 when a promise was broken; what broke it is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fuzz.targets import TARGETS, seeds


def main() -> int:
    """Fuzz what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=f"{', '.join(TARGETS)}; default: all"
    )
    parser.add_argument("--seconds", type=int, default=30, help="for each target (30)")
    parser.add_argument("--hypothesis", action="store_true", help="even where atheris is installed")
    options = parser.parse_args()
    guided = not options.hypothesis and importlib.util.find_spec("atheris") is not None
    print(
        "by atheris" if guided else "by hypothesis" + ("" if options.hypothesis else ": atheris is not installed"), flush=True
    )
    broken = []
    for name in options.targets or TARGETS:
        broken += [] if (by_atheris if guided else by_hypothesis)(name, options.seconds) else [name]
    print(f"broken: {', '.join(broken)}" if broken else "nothing was broken")
    return 1 if broken else 0


def by_atheris(name: str, seconds: int) -> bool:
    """Run one target guided by coverage; whether it held."""
    with tempfile.TemporaryDirectory(prefix="gpupool-fuzz-") as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(seeds()):
            (corpus / str(number)).write_bytes(seed)
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("guided.py")), name, f"-max_total_time={seconds}", "-max_len=2000", "-rss_limit_mb=2048",
             "-print_final_stats=1", f"-artifact_prefix={folder}/", str(corpus)],
            env=os.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        told = [
            line for line in (done.stdout + done.stderr).splitlines() if "number_of_executed_units" in line or " cov: " in line
        ]
        print(f"{name}: {' '.join(told[-2:]) or 'no figures'}", flush=True)
        if done.returncode:
            print((done.stdout + done.stderr)[-4000:])
            for file in Path(folder).glob("crash-*"):
                print(f"{file.name}: {file.read_bytes()!r}")
    return done.returncode == 0


def by_hypothesis(name: str, seconds: int) -> bool:
    """Draw examples until the time is up; whether it held."""
    from hypothesis import HealthCheck, given, settings

    from fuzz.test_fuzz_targets import ANY, MANY, SEVERAL

    until, tried = time.monotonic() + seconds, 0
    target = TARGETS[name]

    @settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=MANY | SEVERAL if name == "core" else ANY | SEVERAL)
    def once(data: bytes) -> None:
        nonlocal tried
        tried += 1
        if time.monotonic() < until:
            target(data)

    try:
        while time.monotonic() < until:
            once()
    except Exception as e:
        print(f"{name}: {type(e).__name__}: {e}", *getattr(e, "__notes__", []), sep="\n")
        return False
    print(f"{name}: {tried:,} examples", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
