"""One target under atheris, in a process of its own: `python guided.py TARGET LIBFUZZER-OPTIONS…`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["gpupool", "fuzz"]):
    from fuzz.targets import TARGETS

if __name__ == "__main__":
    target = TARGETS[sys.argv[1]]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()
