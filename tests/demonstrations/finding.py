"""One measured figure beside the bound that it has to keep, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured, in words. `holds` is None where the figure is only told; `timed` bounds can be broken by a busy machine alone."""

    what: str
    measured: str
    bound: str = ""
    holds: bool | None = None
    timed: bool = False


def below(what: str, value: float, bound: float, unit: str, *, timed: bool = False) -> Finding:
    """A figure that must not be above its bound."""
    return Finding(what, f"{value:.4g} {unit}", f"at most {bound:.4g} {unit}", value <= bound, timed)


def above(what: str, value: float, bound: float, unit: str, *, timed: bool = False) -> Finding:
    """A figure that must not be below its bound."""
    return Finding(what, f"{value:.4g} {unit}", f"at least {bound:.4g} {unit}", value >= bound, timed)


def equal(what: str, value: object, wanted: object) -> Finding:
    """A fact that must be just so."""
    return Finding(what, str(value), str(wanted), value == wanted)


def told(what: str, value: object) -> Finding:
    """A figure that has no bound."""
    return Finding(what, str(value))


def table(findings: Sequence[Finding]) -> str:
    """All of them as Markdown."""
    words = {None: "", True: "yes", False: "**NO**"}
    lines = ["| what | measured | bound | holds |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {f.what} | {f.measured} | {f.bound} | {words[f.holds]} |" for f in findings])


def broken(findings: Sequence[Finding]) -> list[Finding]:
    """Those that do not keep their bound."""
    return [finding for finding in findings if finding.holds is False]
