"""docs/client.md names every error and every option, and says of each what is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import gpupool.client
from gpupool.client import AsyncClient, Client, calls
from gpupool.client.budget import HEDGE_BURST, HEDGE_SHARE, RETRIES_PER_S, RETRY_BURST, RETRY_SHARE
from gpupool.errors import ERRORS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "client.md").read_text()


def test_every_error_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \|", PAGE, re.MULTILINE)
    assert rows == [(cls.__name__, str(code), "yes" if code.retryable else "no") for code, cls in ERRORS.items()]
    assert {cls.__name__ for cls in ERRORS.values()} <= set(gpupool.client.__all__)


def test_every_code_has_its_row_in_the_protocol() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \| (yes|no) \|$", (DOCS / "protocol.md").read_text(), re.MULTILINE)
    told = {code: answer for codes, answer in rows for code in re.findall(r"\w+", codes)}
    assert told == {str(code): "yes" if code.retryable else "no" for code in ERRORS}


@pytest.mark.parametrize("method", ["__init__", "infer", "map", "stream"])
def test_every_option_has_its_row_and_its_default_and_both_clients_have_it(method: str) -> None:
    of_one, of_other = (
        {p.name: p.default for p in inspect.signature(getattr(kind, method)).parameters.values() if p.kind is p.KEYWORD_ONLY}
        for kind in (Client, AsyncClient)
    )
    assert of_one == of_other
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \| [^|]+ \|$", PAGE, re.MULTILINE)
    told: dict[str, list[str]] = {}
    for names, defaults in rows:
        for name in re.findall(r"\w+", names):
            told.setdefault(name, []).extend(re.findall(r"[\w.]+", defaults))
    for name, default in of_one.items():
        assert str(default) in told[name], name


def test_figures_of_the_budgets_are_those_of_the_code() -> None:
    assert (RETRY_SHARE, RETRIES_PER_S, RETRY_BURST, HEDGE_SHARE, HEDGE_BURST) == (0.2, 1.0, 100.0, 0.05, 5.0)
    for words in (
        "a fifth of its requests, plus one a second, in bursts of up to 100",
        "At most 5 %",
        "(5 at once to begin with)",
    ):
        assert words in PAGE
    assert (calls.FIRST_BACKOFF_S, calls.MAX_BACKOFF_S, calls.MAX_OPEN) == (0.25, 5.0, 65536)
    assert "0.25 s, doubling up to 5 s" in PAGE
