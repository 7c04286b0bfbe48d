"""How fast this worker has been of late, over all its models and buckets: what a sample takes, and what one in a full batch would.

Batches count by their fit where that is good, so that one batch's luck does not show.
"""

from __future__ import annotations

from typing import Final

from .fit import BatchFit

#: Weight of the newest batch, from which batch on; before it is a plain mean.
_NEWEST: Final = 1 / 8
_PLAIN: Final = 8


class Service:
    """Smoothed over batches, weighed by their samples."""

    __slots__ = ("_fitted_full_s", "_fitted_rows", "_ran", "_rows", "_seconds")

    def __init__(self) -> None:
        self._ran = 0
        self._rows = self._seconds = 0.0
        self._fitted_rows = self._fitted_full_s = (
            0.0  # of the rows those whose fit is good, and what they would take in full batches
        )

    def ran(self, rows: int, seconds: float, limit: int, fit: BatchFit) -> None:
        """Take in a batch of so many samples where `limit` were allowed; it is in the fit already."""
        self._ran += 1
        # The first batch pays for what is made at first use; the second replaces it.
        weight = _NEWEST if self._ran > _PLAIN else 1 / max(1, self._ran - 1)
        fitted_rows = full_s = 0.0
        if fit.good:
            seconds = fit.predict(rows)
            fitted_rows, full_s = rows, fit.predict(limit) * rows / limit
        self._rows += (rows - self._rows) * weight
        self._seconds += (seconds - self._seconds) * weight
        self._fitted_rows += (fitted_rows - self._fitted_rows) * weight
        self._fitted_full_s += (full_s - self._fitted_full_s) * weight

    @property
    def per_sample_s(self) -> float:
        """What a sample took of late; 0 until known."""
        return self._seconds / self._rows if self._rows else 0.0

    @property
    def full_row_s(self) -> float:
        """What it would have taken, had all batches been full; 0 until most samples have a good fit."""
        return self._fitted_full_s / self._fitted_rows if 2 * self._fitted_rows > self._rows else 0.0
