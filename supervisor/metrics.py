"""The metrics page: what the status document and the counts say, as Prometheus text.

Everything on it is known already when somebody asks, so a scrape touches no request. Labels come from the configuration (workers, devices,
models) and from our own words (codes, reasons), never from clients; a worker's restart adds no series. docs/metrics.md tells what each
metric means, and a test compares it with the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpupool import __version__
from gpupool.batches import SIZES
from gpupool.errors import ErrorCode
from gpupool.stages import BOUNDS_S, STAGES

from .exposition import Histogram, Sample, family, histogram

#: What the router counts and tells, under the same names; the counters of all routers of this run together.
_ROUTER: Final = (
    ("undeliverable_total", "undeliverable_replies_total", "Replies whose client was gone or did not read"),
    ("late_results_total", "late_results_total", "Results of requests that had been answered otherwise, or of nobody's"),
    ("displaced_total", "displaced_total", "Waiting requests refused to make room for a client with fewer"),
    ("overflowed_total", "overflowed_total", "Requests sent to overflow workers"),
    ("unretried_total", "unretried_total", "Requests not run again because the retry budget was used up"),
    ("silenced_total", "silenced_total", "Malformed messages not answered, of connections that send nothing else"),
    (
        "handshakes_refused_total",
        "handshakes_refused_total",
        "Handshakes that failed: a wrong key or none, or no ZeroMQ at all",
    ),
    ("endless_total", "endless_total", "Connections cut because a message of theirs did not end"),
    ("messages_dropped_total", "messages_dropped_total", "Messages of connections that had ended, or whose key was removed"),
)

#: What workers tell of their memory; one that has no budget or no pool tells none.
_MEMORY: Final = (
    ("budget_bytes", "Memory that a worker may use"),
    ("used_bytes", "Memory that a worker uses, as its budget counts it"),
    ("reserved_bytes", "Memory of a card that a worker's allocator holds, in use or cached"),
    ("pool_bytes", "Memory of a card that was reserved at start, above what models hold at rest"),
    ("pool_used_bytes", "What of it is in use"),
)

#: Key of a device in the status document, metric, what it is.
_DEVICE: Final = (
    ("memory_used_bytes", "memory_used_bytes", "Memory in use on a card"),
    ("memory_total_bytes", "memory_total_bytes", "Memory of a card"),
    ("utilization", "utilization_ratio", "Utilisation of a card, 0 to 1"),
    ("temperature_c", "temperature_celsius", "Temperature of a card"),
    ("power_w", "power_watts", "Power that a card draws"),
)

#: What each process tells of its log's way to Fluentd; no series where there is none.
_FORWARDS: Final = (
    ("sent", "log_forwarded_total", "Log records sent to Fluentd, of all processes"),
    ("dropped", "log_forward_dropped_total", "Log records meant for Fluentd that were lost, of all processes"),
)

_CODES: Final = ("ok", *map(str, ErrorCode))
_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Counts:
    """What is counted beside the status document, over all processes of this run.

    Attributes:
        ends: of worker processes, by (worker, reason).
        end_reasons: those there are: each worker has a series of each.
        xids: seen, by (device, number).
        workers: by worker, what its processes counted: see children.Children.tallies.
        router: what the routers counted: see children.Children.router_tally.
        log: of the supervisor's own log, see Log.report.
        forward_up: whether all processes reach Fluentd; None where the log is not forwarded.
        scrape_s: how long the page before this one took.
    """

    ends: Mapping[tuple[int, str], int]
    end_reasons: Iterable[str]
    xids: Mapping[tuple[str, int], int]
    workers: Mapping[int, Mapping[str, Any]]
    router: Mapping[str, Any]
    log: Mapping[str, Any]
    forward_up: bool | None
    scrape_s: float


def page(status: Mapping[str, Any], counts: Counts) -> str:
    """Render the metrics of a pool, whose `status` is the status document."""
    parts = (
        _requests(status, counts),
        _workers(status, counts),
        _batches(status, counts),
        _devices(status, counts),
        _pool(status, counts),
    )
    return "".join(text for part in parts for text in part)


def _gauge(name: str, help_: str, samples: Iterable[Sample]) -> str:
    return family(f"gpupool_{name}", "gauge", help_, samples)


def _counter(name: str, help_: str, samples: Iterable[Sample]) -> str:
    return family(f"gpupool_{name}", "counter", help_, samples)


def _requests(status: Mapping[str, Any], counts: Counts) -> Iterator[str]:
    router, told = status["router"], counts.router
    # Each model has every code from the start: a rate needs a value to start from, and a code's first burst is what alerts are for.
    answered: dict[str, Mapping[str, int]] = {m["name"]: dict.fromkeys(_CODES, 0) for m in status["models"]}
    for model, codes in told.get("replied_by_model", {}).items():
        answered[model] = {**answered.get(model, {}), **codes}
    yield _counter(
        "requests_total", "Requests answered, by model and code",
        [({"model": m, "code": c}, n) for m, codes in answered.items() for c, n in codes.items()],
    )  # fmt: skip
    latencies = told.get("latencies", {})
    yield histogram(
        "gpupool_request_duration_seconds", "From arrival to reply, of requests that were accepted", BOUNDS_S,
        [Histogram({"model": m}, of["total"]["counts"], of["total"]["us"] / 1e6) for m, of in latencies.items()],
    )  # fmt: skip
    yield histogram(
        "gpupool_stage_duration_seconds", "The same by stage; what a worker had, also by its stages", BOUNDS_S,
        [
            Histogram({"model": m, "stage": stage}, of[stage]["counts"], of[stage]["us"] / 1e6)
            for m, of in latencies.items()
            for stage in STAGES
        ],
    )  # fmt: skip
    yield _gauge("pending_requests", "Requests waiting in the router", [({}, router["pending"])])
    redispatched = [({"reason": reason}, n) for reason, n in told.get("redispatched_total", {}).items()]
    yield _counter("redispatched_total", "Requests that came back from a worker and waited again", redispatched)
    for key, name, help_ in _ROUTER:
        yield _counter(name, help_, [({}, told.get(key, 0))])
    yield _gauge("connections", "Connections of clients that are open", [({}, router.get("connections"))])
    help_ = "Those that never sent a message, 15 s and more after they were opened"
    yield _gauge("silent_connections", help_, [({}, router.get("silent_connections"))])
    yield _gauge("pressure", "Whether overflow workers get work", [({}, router.get("pressure", False))])
    yield _gauge("poisoned_requests", "Request contents refused as poison now", [({}, router.get("poisoned", 0))])
    yield _gauge("retry_budget_ratio", "What is left of the retry budget, 0 to 1", [({}, router.get("retry_budget"))])
    yield _counter("router_restarts_total", "Restarts of the router", [({}, router["restarts"])])


def _workers(status: Mapping[str, Any], counts: Counts) -> Iterator[str]:
    workers = status["workers"]

    def told(value: str, scale: float | None = None) -> list[Sample]:
        return [({"worker": w["worker"]}, w[value] if scale is None or w[value] is None else w[value] * scale) for w in workers]

    up: list[Sample] = [({"worker": w["worker"], "device": w["device"]["id"]}, w["state"] == "ready") for w in workers]
    yield _gauge("worker_up", "Whether a worker is ready", up)
    yield _gauge(
        "worker_state",
        "1 for the state that a worker has now",
        [({"worker": w["worker"], "state": w["state"]}, 1) for w in workers],
    )
    yield _gauge("worker_late", "Whether a worker's beat or batch is overdue: it gets no work", told("late"))
    ends = {(w["worker"], reason): 0 for w in workers for reason in counts.end_reasons}
    yield _counter(
        "worker_restarts_total", "Ends of worker processes, by reason",
        [({"worker": worker, "reason": reason}, n) for (worker, reason), n in {**ends, **counts.ends}.items()],
    )  # fmt: skip
    yield _gauge("heartbeat_age_seconds", "Age of a worker's last beat", told("heartbeat_age_ms", 1e-3))
    yield _gauge("in_flight_requests", "Requests at workers (in samples)", told("in_flight"))
    yield _gauge("queue_length", "Samples waiting in a worker", told("queue_length"))
    yield _gauge("batch_limit", "Largest batch in force", told("batch_limit"))
    yield _gauge("window_seconds", "Batching window in force", told("window_ms", 1e-3))
    yield _gauge("sample_seconds", "Time per sample of late", [(at, value or None) for at, value in told("service_ms", 1e-3)])
    rss: list[Sample] = [({"worker": w["worker"], "kind": "rss"}, w["memory"].get("rss_bytes")) for w in workers]
    yield _gauge("process_memory_bytes", "Memory of worker processes", rss)
    leaks = [({"worker": w["worker"], "kind": kind}, leak) for w in workers for kind, leak in w["leak"].items()]
    slopes: list[Sample] = [(at, leak["slope_bytes_per_hour"]) for at, leak in leaks]
    yield _gauge("memory_slope_bytes_per_hour", "Rise of a worker's memory in an hour of work", slopes)
    suspected: list[Sample] = [(at, leak["suspected"]) for at, leak in leaks]
    yield _gauge("memory_leak_suspected", "Whether that rise is taken for a leak", suspected)
    oom: list[Sample] = [({"worker": w["worker"]}, w.get("oom_total", 0)) for w in workers]
    yield _counter("oom_total", "Runs of forward that failed for want of memory", oom)
    for key, help_ in _MEMORY:
        yield _gauge(f"memory_{key}", help_, [({"worker": w["worker"]}, w["memory"].get(key)) for w in workers])


def _batches(status: Mapping[str, Any], counts: Counts) -> Iterator[str]:
    told = [({"worker": w["worker"]}, counts.workers.get(w["worker"], {})) for w in status["workers"]]
    closed: list[Sample] = [({**at, "reason": reason}, n) for at, of in told for reason, n in of.get("closed", {}).items()]
    yield _counter("batch_close_total", "Batches, by why they closed", closed)
    batches: list[Sample] = [(at, sum(of.get("closed", {}).values())) for at, of in told]
    yield _counter("batches_total", "Batches that workers have begun", batches)
    samples: list[Sample] = [(at, sum(sizes["samples"] for sizes in of.get("sizes", {}).values())) for at, of in told]
    yield _counter("samples_total", "Samples in them", samples)
    sizes = [
        Histogram({"model": model, **at}, of_model["counts"], of_model["samples"])
        for at, of in told
        for model, of_model in of.get("sizes", {}).items()
    ]
    yield histogram("gpupool_batch_size", "Samples in a batch", SIZES, sizes)
    for key, help_ in (
        ("predicted", "What batches were expected to take, where that was known well"),
        ("measured", "What those batches took"),
    ):
        sums: list[Sample] = [(at, float(of.get("prediction", {}).get(f"{key}_s", 0.0))) for at, of in told]
        yield _counter(f"batch_{key}_seconds_total", help_, sums)


def _devices(status: Mapping[str, Any], counts: Counts) -> Iterator[str]:
    devices = [({"device": w["device"]["id"]}, w["device"]) for w in status["workers"]]
    for key, name, help_ in _DEVICE:
        yield _gauge(f"device_{name}", help_, [(at, device.get(key)) for at, device in devices])
    health: list[Sample] = [({**at, "health": device["health"]}, 1) for at, device in devices]
    yield _gauge("device_health", "1 for the health that a device has now", health)
    events: list[Sample] = [
        ({**at, "reason": reason}, holds)
        for at, device in devices
        for reason, holds in (device.get("clocks_events") or {}).items()
    ]
    yield _gauge("device_clocks_event", "Whether a reason holds a card's clocks down now", events)
    seen: list[Sample] = [({"device": device, "xid": xid}, n) for (device, xid), n in sorted(counts.xids.items())]
    yield _counter("device_xid_total", "XIDs seen", seen)


def _pool(status: Mapping[str, Any], counts: Counts) -> Iterator[str]:
    pool = status["pool"]
    yield _gauge("workers_ready", "Workers that take work", [({}, pool["workers_ready"])])
    yield _gauge("workers_configured", "Workers configured", [({}, pool["workers_configured"])])
    yield _gauge("batch_factor", "Share of the configured batch in force", [({}, pool["batch_factor"])])
    yield _gauge("window_factor", "Share of the configured window in force", [({}, pool["window_factor"])])
    yield _gauge("degrade_level", "Which degrade rule is in force, counted from 1; 0: none", [({}, pool["degrade_level"])])
    yield _gauge(
        "last_reload_success",
        "Whether the last reload was applied; 1 before the first",
        [({}, pool["last_reload_error"] is None)],
    )
    yield _gauge("config_generation", "How many configurations have been in force", [({}, pool["config_generation"])])
    yield _gauge("uptime_seconds", "Since the supervisor's start", [({}, pool["uptime_s"])])
    yield _gauge("scrape_seconds", "How long the page before this one took", [({}, counts.scrape_s)])
    logs = [counts.log, *(told.get("log", {}) for told in (counts.router, *counts.workers.values()))]
    drops: list[Sample] = [({"level": level}, sum(log.get("losses", {}).get(level, 0) for log in logs)) for level in _LEVELS]
    yield _counter("log_records_dropped_total", "Log records that were lost, of all processes", drops)
    forwards = [log.get("forwarding") or {} for log in logs] if counts.forward_up is not None else []
    for key, name, help_ in _FORWARDS:
        total: list[Sample] = [({}, sum(of.get(key, 0) for of in forwards) if forwards else None)]
        yield _counter(name, help_, total)
    yield _gauge("log_forward_up", "Whether all processes reach Fluentd", [({}, counts.forward_up)])
    yield _gauge("build_info", "The running version", [({"version": __version__}, 1)])
