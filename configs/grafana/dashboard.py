"""The Grafana dashboard as a list of rows and panels; run this file to write it into gpupool.json beside it.

Grafana's own form has forty lines a panel and puts each on the grid by hand: here a panel is its title, its unit and its queries.
A test compares the two files, checks the JSON by Grafana's types and asks a real Prometheus each query.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

TARGET: Final = Path(__file__).with_name("gpupool.json")
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

#: Which series the variables at the top choose.
POOL: Final = 'instance=~"$instance"'
MODEL: Final = f'{POOL}, model=~"$model"'
WORKER: Final = f'{POOL}, worker=~"$worker"'
#: Devices have no worker's label: those of the chosen workers are found by this.
OF_WORKER: Final = f"and on (instance, device) gpupool_worker_up{{{WORKER}}}"
RATE: Final = "[$__rate_interval]"

WIDTH: Final = 24
Query = tuple[str, str]
Panel = dict[str, Any]


def panel(
    kind: str, title: str, unit: str, *queries: Query, width: int = 8, height: int = 8, about: str = "", **more: Any
) -> Panel:
    """One panel. A query is an expression and its legend; `more` goes into its fieldConfig's defaults."""
    targets = [
        {"refId": chr(ord("A") + n), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "instant": kind != "timeseries", "range": kind == "timeseries"}
        for n, (expr, legend) in enumerate(queries)
    ]  # fmt: skip
    made: Panel = {
        "type": kind, "title": title, "datasource": DATASOURCE, "targets": targets, "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit, **more}, "overrides": []},
    }  # fmt: skip
    if about:
        made["description"] = about
    return made


def lines(title: str, unit: str, *queries: Query, about: str = "", width: int = 8, **more: Any) -> Panel:
    """Values over time."""
    made = panel("timeseries", title, unit, *queries, about=about, width=width, min=0, **more)
    made["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}, "tooltip": {"mode": "multi", "sort": "desc"},
    }  # fmt: skip
    return made


def figure(title: str, unit: str, expr: str, *, about: str = "", good: float | None = None, bad: float | None = None) -> Panel:
    """One number; red below `good`, or from `bad` on."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if good is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": good}]
    elif bad is not None:
        steps.append({"color": "red", "value": bad})
    made = panel(
        "stat", title, unit, (expr, ""), about=about, width=3, height=4, thresholds={"mode": "absolute", "steps": steps}
    )
    made["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
    }
    return made


def share(part: str, whole: str) -> str:
    """A ratio of two expressions, without a value where there is nothing to have a share of."""
    return f"{part} / ({whole} > 0)"


def per(labels: str, metric: str, where: str) -> str:
    """The rate of a counter, summed by labels."""
    return f"sum by ({labels}) (rate({metric}{{{where}}}{RATE}))"


MISTAKES: Final = "bad_request|invalid_input|too_large|unknown_model|version_mismatch|cancelled"
ROWS: Final[list[tuple[str, list[Panel]]]] = [
    ("Overview", [
        figure("Workers ready", "none", f"sum(gpupool_workers_ready{{{POOL}}})", good=1),
        figure("of configured", "percentunit", f"sum(gpupool_workers_ready{{{POOL}}}) / sum(gpupool_workers_configured{{{POOL}}})", good=1),
        figure("Waiting", "none", f"sum(gpupool_pending_requests{{{POOL}}})", bad=100, about="Requests in the router; GpupoolQueueLong is at 100."),
        figure("Answered", "reqps", f'sum(rate(gpupool_requests_total{{{MODEL}, code="ok"}}{RATE}))'),
        figure(
            "Errors", "percentunit",
            f'sum(rate(gpupool_requests_total{{{MODEL}, code!~"ok|{MISTAKES}"}}{RATE}) or 0 * gpupool_workers_configured{{{POOL}}}) / '
            f'(sum(rate(gpupool_requests_total{{{MODEL}, code!~"{MISTAKES}"}}{RATE})) > 0)',
            bad=0.01, about="Without mistakes of clients (bad_request, invalid_input, …).",
        ),
        figure("p99", "s", f"max(histogram_quantile(0.99, sum by (instance, model, le) (rate(gpupool_request_duration_seconds_bucket{{{MODEL}}}{RATE}))))", about="Of the slowest model."),
        figure("Alerts", "none", 'count(ALERTS{alertname=~"Gpupool.*", alertstate="firing"}) or vector(0)', bad=1, about="Firing, of all pools."),
        figure("Up since", "s", f"min(gpupool_uptime_seconds{{{POOL}}})", about="The supervisor."),
        lines("Answers", "reqps", (per("model", "gpupool_requests_total", f'{MODEL}, code="ok"'), "{{model}} ok"),
              (f'sum(rate(gpupool_requests_total{{{MODEL}, code!="ok"}}{RATE}) or 0 * gpupool_workers_configured{{{POOL}}})', "not ok")),
        lines("Requests open", "none", (f"sum by (instance) (gpupool_pending_requests{{{POOL}}})", "waiting in the router"), (f"sum by (instance) (gpupool_in_flight_requests{{{POOL}}})", "at workers (samples)")),
        lines("p99 against its baseline", "s", (f"instance_model:gpupool_request_duration_seconds:p99{{{MODEL}}}", "{{model}}"), (f"3 * instance_model:gpupool_request_duration_seconds:p99_baseline{{{MODEL}}}", "{{model}}, alert"),
              about="From the recording rules: p99 over 5 minutes, and 3 times the median of the last week's. The second line needs an hour of history."),
    ]),
    ("Latency by stage", [
        lines("Latency", "s", *((f"histogram_quantile({q}, sum by (model, le) (rate(gpupool_request_duration_seconds_bucket{{{MODEL}}}{RATE})))", f"{{{{model}}}} p{round(100 * q)}") for q in (0.5, 0.95, 0.99)), width=12),
        lines("Stages, mean", "s", (share(per("stage", "gpupool_stage_duration_seconds_sum", f'{MODEL}, stage!="total"'), per("stage", "gpupool_stage_duration_seconds_count", f'{MODEL}, stage!="total"')), "{{stage}}"),
              width=12, about="Where the time goes: pending is the wait in the router, queue that in the worker.", custom={"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 20}),
        lines("Stages, p99", "s", (f"histogram_quantile(0.99, sum by (stage, le) (rate(gpupool_stage_duration_seconds_bucket{{{MODEL}}}{RATE})))", "{{stage}}"), width=12,
              about="Of each stage by itself: they do not add up."),
        lines("Stages, p50", "s", (f"histogram_quantile(0.5, sum by (stage, le) (rate(gpupool_stage_duration_seconds_bucket{{{MODEL}}}{RATE})))", "{{stage}}"), width=12),
    ]),
    ("Batches", [
        lines("Samples in a batch, mean", "none", (share(per("worker", "gpupool_batch_size_sum", f'{MODEL}, worker=~"$worker"'), per("worker", "gpupool_batch_size_count", f'{MODEL}, worker=~"$worker"')), "worker {{worker}}"),
              (f"max(gpupool_batch_limit{{{WORKER}}})", "limit in force")),
        lines("Why batches close", "ops", (per("reason", "gpupool_batch_close_total", WORKER), "{{reason}}"), about="full: the limit. min: min_batch. window: its end. idle: waiting would not pay. deadline, alone: a member's."),
        lines("Batch time, measured / predicted", "none", (share(per("worker", "gpupool_batch_measured_seconds_total", WORKER), per("worker", "gpupool_batch_predicted_seconds_total", WORKER)), "worker {{worker}}"),
              about="1: as predicted. Deadlines are foretold by it. After a change of speed it is 1 again once the fit has learned, in some hundred batches."),
        lines("Samples", "ops", (per("worker", "gpupool_samples_total", WORKER), "worker {{worker}}"), width=6),
        lines("Time per sample", "s", (f"gpupool_sample_seconds{{{WORKER}}}", "worker {{worker}}"), (f"1.5 * instance_worker:gpupool_sample_seconds:baseline{{{WORKER}}}", "worker {{worker}}, alert"), width=6,
              about="The second line is 1.5 times the median of the last week's, and needs an hour of history: GpupoolModelSlow, where batches are no smaller than usual."),
        lines("Samples waiting in workers", "none", (f"gpupool_queue_length{{{WORKER}}}", "worker {{worker}}"), width=6),
        lines("Window in force", "s", (f"gpupool_window_seconds{{{WORKER}}}", "worker {{worker}}"), width=6),
    ]),
    ("Memory", [
        lines("Cards", "percentunit", (f"gpupool_device_memory_used_bytes{{{POOL}}} / gpupool_device_memory_total_bytes{{{POOL}}} {OF_WORKER}", "{{device}}"), max=1, about="GpupoolDeviceMemoryHigh is at 90 %."),
        lines("Budget of workers", "bytes", (f"gpupool_memory_used_bytes{{{WORKER}}}", "worker {{worker}} used"), (f"gpupool_memory_budget_bytes{{{WORKER}}}", "worker {{worker}} budget")),
        lines("Pool on cards", "bytes", (f"gpupool_memory_pool_bytes{{{WORKER}}}", "worker {{worker}} pool"), (f"gpupool_memory_pool_used_bytes{{{WORKER}}}", "worker {{worker}} in use"), (f"gpupool_memory_reserved_bytes{{{WORKER}}}", "worker {{worker}} allocator")),
        lines("Resident memory of processes", "bytes", (f"gpupool_process_memory_bytes{{{WORKER}}}", "worker {{worker}} {{kind}}")),
        lines("Rise in an hour of work", "bytes", (f"gpupool_memory_slope_bytes_per_hour{{{WORKER}}}", "worker {{worker}} {{kind}}"), about="What the watch for leaks measures, once it has seen a window of work."),
        lines("Out of memory", "ops", (per("worker", "gpupool_oom_total", WORKER), "worker {{worker}}")),
    ]),
    ("Cards", [
        lines("Utilisation", "percentunit", (f"gpupool_device_utilization_ratio{{{POOL}}} {OF_WORKER}", "{{device}}"), max=1, about="GpupoolGpuIdle: below 20 % while its worker has work."),
        lines("Temperature", "celsius", (f"gpupool_device_temperature_celsius{{{POOL}}} {OF_WORKER}", "{{device}}")),
        lines("Power", "watt", (f"gpupool_device_power_watts{{{POOL}}} {OF_WORKER}", "{{device}}")),
        lines("Clocks lowered by", "none", (f"(gpupool_device_clocks_event{{{POOL}}} == 1) {OF_WORKER}", "{{device}} {{reason}}"), about="A power cap is a loaded card's normal state; heat and power brake are not."),
        lines("XIDs seen", "none", (f"gpupool_device_xid_total{{{POOL}}} {OF_WORKER}", "{{device}} XID {{xid}}")),
        lines("Health", "none", (f"gpupool_device_health{{{POOL}}} {OF_WORKER}", "{{device}} {{health}}"), about="1 for the health that a device has now."),
    ]),
    ("Errors", [
        lines("Errors by code", "reqps", (per("code", "gpupool_requests_total", f'{MODEL}, code!="ok"'), "{{code}}"), width=12),
        lines("Share of errors", "percentunit", (f"instance_model:gpupool_request_errors:ratio5m{{{MODEL}}} or 0 * instance_model:gpupool_requests:rate5m{{{MODEL}}}", "{{model}}"),
              (f"instance:gpupool_client_mistakes:ratio5m{{{POOL}}}", "mistakes of clients"), width=12, about="GpupoolErrorRateHigh is at 1 %. Mistakes of clients are no errors."),
        lines("Run again", "reqps", (per("reason", "gpupool_redispatched_total", POOL), "{{reason}}"), (per("instance", "gpupool_unretried_total", POOL), "not, for want of budget")),
        lines("Retry budget left, contents refused as poison", "none", (f"gpupool_retry_budget_ratio{{{POOL}}}", "budget, 1 is full"), (f"gpupool_poisoned_requests{{{POOL}}}", "poisoned")),
        lines("Not delivered, not read, not let in", "ops", *((per("instance", f"gpupool_{name}_total", POOL), words) for name, words in (
            ("undeliverable_replies", "replies to nobody"), ("late_results", "late results"), ("displaced", "displaced"), ("silenced", "silenced"),
            ("messages_dropped", "dropped"), ("handshakes_refused", "handshakes refused"), ("endless", "endless messages")))),
    ]),
    ("Restarts", [
        lines("Ends of workers", "none", (f"sum by (worker, reason) (gpupool_worker_restarts_total{{{WORKER}}})", "worker {{worker}} {{reason}}"), about="Since the pool started. crash and stuck are deaths; operator and recycle are planned."),
        lines("Workers by state", "none", (f"count by (state) (gpupool_worker_state{{{WORKER}}} == 1)", "{{state}}"), (f"sum(gpupool_worker_late{{{WORKER}}})", "late")),
        lines("Age of heartbeats", "s", (f"gpupool_heartbeat_age_seconds{{{WORKER}}}", "worker {{worker}}")),
        lines("Restarts of the router", "none", (f"gpupool_router_restarts_total{{{POOL}}}", "{{instance}}"), width=6),
        lines("Degraded", "none", (f"gpupool_degrade_level{{{POOL}}}", "rule in force"), (f"gpupool_batch_factor{{{POOL}}}", "share of the batch limit"), (f"gpupool_window_factor{{{POOL}}}", "share of the window"), width=6),
        lines("Overflow", "none", (f"gpupool_pressure{{{POOL}}}", "on"), (per("instance", "gpupool_overflowed_total", POOL), "requests/s"), width=6),
        lines("Configuration", "none", (f"gpupool_config_generation{{{POOL}}}", "generation"), (f"gpupool_last_reload_success{{{POOL}}}", "last reload taken"), width=6),
    ]),
    ("The pool itself", [
        lines("Log records lost", "ops", (per("level", "gpupool_log_records_dropped_total", POOL), "{{level}}"), width=6),
        lines("To Fluentd", "ops", (per("instance", "gpupool_log_forwarded_total", POOL), "sent"), (per("instance", "gpupool_log_forward_dropped_total", POOL), "lost"), (f"gpupool_log_forward_up{{{POOL}}}", "reached, 1 or 0"), about="Where logs.fluentd is set.", width=6),
        lines("Connections of clients", "none", (f"gpupool_connections{{{POOL}}}", "open"), (f"gpupool_silent_connections{{{POOL}}}", "that never sent anything"), width=6),
        lines("Rendering this page of metrics", "s", (f"gpupool_scrape_seconds{{{POOL}}}", "{{instance}}"), width=6),
    ]),
]  # fmt: skip


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice among a label's values; all of them, and none too, by default."""
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": name},
        "includeAll": True, "allValue": ".*", "multi": True, "current": {"text": ["All"], "value": ["$__all"]}, "refresh": 2, "sort": 3,
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole, each row's panels set from left to right."""
    panels: list[Panel] = []
    y = 0
    for title, members in ROWS:
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )
        x, y, tall = 0, y + 1, 0
        for member in members:
            size = member["gridPos"]
            if x + size["w"] > WIDTH:
                x, y, tall = 0, y + tall, 0
            panels.append({**member, "gridPos": {"x": x, "y": y, **size}})
            x, tall = x + size["w"], max(tall, size["h"])
        y += tall
    return {
        "uid": "gpupool", "title": "gpupool", "description": "An inference pool: docs/runbook.md says what to do about its alerts.",
        "tags": ["gpupool"], "schemaVersion": 39, "version": 1, "editable": True, "graphTooltip": 1, "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
            variable("instance", "Pool", "label_values(gpupool_build_info, instance)"),
            variable("model", "Model", f"label_values(gpupool_requests_total{{{POOL}}}, model)"),
            variable("worker", "Worker", f"label_values(gpupool_worker_up{{{POOL}}}, worker)"),
        ]},
        "annotations": {"list": [{
            "name": "Alerts", "enable": True, "iconColor": "red", "datasource": DATASOURCE,
            "expr": 'ALERTS{alertname=~"Gpupool.*", alertstate="firing"}',
        }]},
        "panels": [{"id": n, **made} for n, made in enumerate(panels, 1)],
    }  # fmt: skip


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
