"""The metrics page: the status document as Prometheus text.

Everything on it is known already when somebody asks, so a scrape touches no request. Labels come from the configuration (workers, devices,
models) and from our own words (codes, reasons), never from clients; a worker's restart adds no series. The text format is four lines of
code; the client library would cost the supervisor a fifth of its memory. A test reads the page with that library's parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from gpupool import __version__
from gpupool.batches import SIZES

Sample = tuple[dict[str, Any], float | int | None]
Family = tuple[str, str, str, list[Sample]]

#: What the router counts, under the same names.
_ROUTER: Final = (
    ("late_results_total", "counter", "Results of requests that had been answered otherwise, or of nobody's"),
    ("displaced_total", "counter", "Waiting requests refused to make room for a client with fewer"),
    ("overflowed_total", "counter", "Requests sent to overflow workers"),
    ("unretried_total", "counter", "Requests not run again because the retry budget was used up"),
    ("silenced_total", "counter", "Malformed messages not answered, of connections that send nothing else"),
    ("connections", "gauge", "Connections of clients that are open"),
    ("silent_connections", "gauge", "Those that never sent a message, 15 s and more after they were opened"),
    ("handshakes_refused_total", "counter", "Handshakes that failed: a wrong key or none, or no ZeroMQ at all"),
    ("endless_total", "counter", "Connections cut because a message of theirs did not end"),
    ("messages_dropped_total", "counter", "Messages of connections that had ended, or whose key was removed"),
)

#: What workers tell of their memory; one that has no budget or no pool tells none.
_MEMORY: Final = (
    ("budget_bytes", "Memory that a worker may use"),
    ("used_bytes", "Memory that a worker uses, as its budget counts it"),
    ("reserved_bytes", "Memory of a card that a worker's allocator holds, in use or cached"),
    ("pool_bytes", "Memory of a card that was reserved at start, above what models hold at rest"),
    ("pool_used_bytes", "What of it is in use"),
)

#: In a histogram's labels: which of its series a sample is.
_SUFFIX: Final = "__suffix__"

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def page(
    status: Mapping[str, Any],
    restarts: Mapping[tuple[int, str], int],
    xids: Mapping[tuple[str, int], int],
    batches: Mapping[int, Mapping[str, Any]],
) -> str:
    """Render the metrics of a pool.

    Args:
        status: the status document.
        restarts: unplanned and planned restarts by (worker, reason).
        xids: XIDs seen by (device, number).
        batches: by worker, what its processes counted: `closed` by reason, `sizes` by model (see worker.account).
    """
    return "".join(_text(family) for family in (*_families(status, restarts, xids), *_batches(batches)))


def _batches(batches: Mapping[int, Mapping[str, Any]]) -> Iterator[Family]:
    closed = [
        ({"worker": worker, "reason": reason}, count)
        for worker, told in batches.items()
        for reason, count in told.get("closed", {}).items()
    ]
    yield "gpupool_batch_close_total", "counter", "Batches, by why they closed", closed
    sizes: list[Sample] = []
    for worker, told in batches.items():
        for model, of_model in told.get("sizes", {}).items():
            labels = {"model": model, "worker": worker}
            below = list(accumulate(of_model["counts"]))
            bounds = [*map(str, SIZES), "+Inf"]
            sizes += [({**labels, "le": bound, _SUFFIX: "_bucket"}, n) for bound, n in zip(bounds, below, strict=True)]
            sizes += [({**labels, _SUFFIX: "_sum"}, of_model["samples"]), ({**labels, _SUFFIX: "_count"}, below[-1])]
    yield "gpupool_batch_size", "histogram", "Samples in a batch", sizes


def _families(
    status: Mapping[str, Any], restarts: Mapping[tuple[int, str], int], xids: Mapping[tuple[str, int], int]
) -> Iterator[Family]:
    pool, router, workers = status["pool"], status["router"], status["workers"]

    def by_worker(value: str, scale: float = 1.0) -> list[Sample]:
        return [({"worker": w["worker"]}, None if w[value] is None else w[value] * scale) for w in workers]

    def by_device(value: str) -> list[Sample]:
        return [({"device": w["device"]["id"]}, w["device"].get(value)) for w in workers]

    requests = [
        ({"model": m, "code": c}, n) for m, codes in router.get("replied_by_model", {}).items() for c, n in codes.items()
    ]
    yield "gpupool_requests_total", "counter", "Requests answered, by model and code", requests
    yield "gpupool_pending_requests", "gauge", "Requests waiting in the router", [({}, router["pending"])]
    yield "gpupool_in_flight_requests", "gauge", "Requests at workers (in samples)", by_worker("in_flight")
    redispatched = [({"reason": r}, n) for r, n in router.get("redispatched_total", {}).items()]
    yield "gpupool_redispatched_total", "counter", "Requests that came back from a worker and waited again", redispatched
    undeliverable: list[Sample] = [({}, router.get("undeliverable_total", 0))]
    yield "gpupool_undeliverable_replies_total", "counter", "Replies whose client was gone or did not read", undeliverable
    for key, kind, help_ in _ROUTER:
        count: list[Sample] = [({}, router.get(key, 0))]
        yield f"gpupool_{key}", kind, help_, count
    pressure: list[Sample] = [({}, int(router.get("pressure", False)))]
    yield "gpupool_pressure", "gauge", "Whether overflow workers get work", pressure
    yield "gpupool_poisoned_requests", "gauge", "Request contents refused as poison now", [({}, router.get("poisoned", 0))]
    yield "gpupool_router_restarts_total", "counter", "Restarts of the router", [({}, router["restarts"])]
    yield "gpupool_queue_length", "gauge", "Samples waiting in a worker", by_worker("queue_length")
    yield "gpupool_batch_limit", "gauge", "Largest batch in force", by_worker("batch_limit")
    yield "gpupool_window_seconds", "gauge", "Batching window in force", by_worker("window_ms", 1e-3)
    up: list[Sample] = [({"worker": w["worker"], "device": w["device"]["id"]}, int(w["state"] == "ready")) for w in workers]
    yield "gpupool_worker_up", "gauge", "Whether a worker is ready", up
    by_reason: list[Sample] = [({"worker": worker, "reason": reason}, n) for (worker, reason), n in sorted(restarts.items())]
    yield "gpupool_worker_restarts_total", "counter", "Ends of worker processes, by reason", by_reason
    yield "gpupool_workers_ready", "gauge", "Workers that take work", [({}, pool["workers_ready"])]
    yield "gpupool_workers_configured", "gauge", "Workers configured", [({}, pool["workers_configured"])]
    yield "gpupool_batch_factor", "gauge", "Share of the configured batch in force", [({}, pool["batch_factor"])]
    yield "gpupool_window_factor", "gauge", "Share of the configured window in force", [({}, pool["window_factor"])]
    yield "gpupool_heartbeat_age_seconds", "gauge", "Age of a worker's last beat", by_worker("heartbeat_age_ms", 1e-3)
    rss: list[Sample] = [({"worker": w["worker"], "kind": "rss"}, w["memory"].get("rss_bytes")) for w in workers]
    yield "gpupool_process_memory_bytes", "gauge", "Memory of worker processes", rss
    leaks = [(w["worker"], kind, leak) for w in workers for kind, leak in w["leak"].items()]
    slopes: list[Sample] = [({"worker": n, "kind": kind}, leak["slope_bytes_per_hour"]) for n, kind, leak in leaks]
    yield "gpupool_memory_slope_bytes_per_hour", "gauge", "Rise of a worker's memory in an hour of work", slopes
    suspected: list[Sample] = [({"worker": n, "kind": kind}, int(leak["suspected"])) for n, kind, leak in leaks]
    yield "gpupool_memory_leak_suspected", "gauge", "Whether that rise is taken for a leak", suspected
    oom: list[Sample] = [({"worker": w["worker"]}, w.get("oom_total", 0)) for w in workers]
    yield "gpupool_oom_total", "counter", "Runs of forward that failed for want of memory", oom
    for key, help_ in _MEMORY:
        told: list[Sample] = [({"worker": w["worker"]}, w["memory"].get(key)) for w in workers]
        yield f"gpupool_memory_{key}", "gauge", help_, told
    yield "gpupool_device_memory_used_bytes", "gauge", "Memory in use on a card", by_device("memory_used_bytes")
    yield "gpupool_device_memory_total_bytes", "gauge", "Memory of a card", by_device("memory_total_bytes")
    yield "gpupool_device_utilization_ratio", "gauge", "Utilisation of a card, 0 to 1", by_device("utilization")
    yield "gpupool_device_temperature_celsius", "gauge", "Temperature of a card", by_device("temperature_c")
    health: list[Sample] = [({"device": w["device"]["id"], "health": w["device"]["health"]}, 1) for w in workers]
    yield "gpupool_device_health", "gauge", "1 for the health that a device has now", health
    seen: list[Sample] = [({"device": device, "xid": xid}, n) for (device, xid), n in sorted(xids.items())]
    yield "gpupool_device_xid_total", "counter", "XIDs seen", seen
    drops: list[Sample] = [({"level": level}, n) for level, n in status.get("log_records_dropped", {}).items()]
    yield "gpupool_log_records_dropped_total", "counter", "Log records of the supervisor that were lost", drops
    yield "gpupool_build_info", "gauge", "The running version", [({"version": __version__}, 1)]


def _text(family: Family) -> str:
    name, kind, help_, samples = family
    lines = [
        f"{name}{labels.get(_SUFFIX, '')}{_labels(labels)} {_number(value)}\n" for labels, value in samples if value is not None
    ]
    return f"# HELP {name} {help_}\n# TYPE {name} {kind}\n{''.join(lines)}" if lines else ""


def _labels(labels: Mapping[str, Any]) -> str:
    return (
        "{" + _joined(f'{k}="{str(v).translate(_ESCAPES)}"' for k, v in labels.items() if k != _SUFFIX) + "}" if labels else ""
    )


def _joined(parts: Iterable[str]) -> str:
    return ",".join(parts)


def _number(value: float) -> str:
    """Integers in full: counters are compared by their differences."""
    return str(value) if isinstance(value, int) else repr(float(value))
