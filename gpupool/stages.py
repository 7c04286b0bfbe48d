"""The stages of a request and the bounds by which their times are counted: the router counts by them, the metrics page names them."""

from __future__ import annotations

from typing import Final

#: As in `timings_ms` of a reply. The first ROUTER_STAGES every answered request has; the others only one that a worker gave back.
STAGES: Final = ("pending", "total", "queue", "preprocess", "forward", "postprocess")
ROUTER_STAGES: Final = 2
#: Upper bounds, from 1 ms to a minute. Longer ones are counted beyond the last.
BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BOUNDS_US: Final = tuple(round(1e6 * bound) for bound in BOUNDS_S)
