"""The bounds by which batch sizes are counted: workers count by them, the metrics page names them."""

from __future__ import annotations

from typing import Final

#: Upper bounds in samples, powers of two, so that a size's place is its bit length. Larger ones are counted beyond the last.
SIZES: Final = tuple(1 << n for n in range(11))
