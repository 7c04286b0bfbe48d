"""Metrics as Prometheus text (format 0.0.4). It is a few lines of code; the client library would cost the supervisor a fifth of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

Labels = Mapping[str, object]
#: A value that is None is not known now: it has no series.
Sample = tuple[Labels, float | None]

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(frozen=True, slots=True)
class Histogram:
    """One series of a histogram: how many were up to each bound, and above the last; and the sum of all."""

    labels: Labels
    counts: Sequence[int]
    sum: float


def family(name: str, kind: str, help_: str, samples: Iterable[Sample]) -> str:
    """Render counters or gauges. The head stands there without samples, too: so every metric can be found on every page."""
    lines = [f"{name}{_braces(labels)} {_number(value)}\n" for labels, value in samples if value is not None]
    return _head(name, kind, help_) + "".join(lines)


def histogram(name: str, help_: str, bounds: Sequence[float], series: Iterable[Histogram]) -> str:
    """Render a histogram whose buckets end at `bounds` and at infinity."""
    ends = [f'le="{bound}"}} ' for bound in (*bounds, "+Inf")]
    lines = [_head(name, "histogram", help_)]
    for each in series:
        labels = _labels(each.labels)
        start, below = f"{name}_bucket{{{labels},", list(accumulate(each.counts))
        lines += [f"{start}{end}{count}\n" for end, count in zip(ends, below, strict=True)]
        lines.append(f"{name}_sum{{{labels}}} {_number(each.sum)}\n{name}_count{{{labels}}} {below[-1]}\n")
    return "".join(lines)


def _head(name: str, kind: str, help_: str) -> str:
    return f"# HELP {name} {help_}\n# TYPE {name} {kind}\n"


def _braces(labels: Labels) -> str:
    return "{" + _labels(labels) + "}" if labels else ""


def _labels(labels: Labels) -> str:
    return ",".join([f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items()])


def _number(value: Any) -> str:
    """Integers in full: counters are compared by their differences."""
    return str(int(value)) if isinstance(value, int) else repr(float(value))
