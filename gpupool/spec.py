"""What a child process is told at its start: plain values, checked by the supervisor, sent as its first channel message."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LogSpec:
    """Where and how a process logs. `fd` is an inherited descriptor; `file` wins when it is not empty."""

    level: str = "info"
    format: str = "json"
    file: str = ""
    fd: int = 2
    queue_size: int = 10000
    request_sample: float = 1.0  # share of `ok` request lines that are written
    fluentd: str = ""  # "HOST:PORT" of a forward input beside all that


@dataclass(frozen=True, slots=True)
class BatchingSpec:
    """Batching of one model in one worker; counts are samples."""

    max_batch: int = 32
    min_batch: int = 8
    window_ms: float = 5.0
    idle_window_ms: float = 1.0
    adaptive: bool = True
    max_queue: int = 100
    length_buckets: tuple[int, ...] = ()
    p99_ms: float = 0.0  # objective that the largest batch is tuned to; 0: it is not


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of the pool; its index in the list is its number on the link."""

    name: str
    version: str = "1"
    handler: str = ""  # "pkg.module:Class"
    directory: str = ""  # absolute; "" for a handler given by import path alone
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    batching: BatchingSpec = BatchingSpec()
    preprocess_threads: int = 1  # samples that may be in its preprocess at a time


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """Memory settings handed to workers; all but limit_fraction may change while they run."""

    limit_fraction: float = 0.9
    empty_cache_above: float = 0.9
    start_fraction: float = 0.7
    cpu_limit_bytes: int = 0  # 0: no limit


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """Where the router finds its keys. Paths only: a secret travels over no channel."""

    secret_key_file: str
    authorized_keys_dir: str


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """Bounds of one client, all its connections together; None: those of the pool hold."""

    max_pending: int | None = None
    max_pending_bytes: int | None = None
    max_priority: int | None = None


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """Which requests the router traces, and where the spans go. The file's path only: a secret travels over no channel."""

    endpoint: str = ""  # of OTLP over HTTP; "": no request is traced
    sample: float = 0.01  # share of the requests, of those whose client does not decide
    service_name: str = "gpupool"
    headers_file: str = ""
    max_flagged_per_s: int = 100  # requests traced because their client says so
    devices: tuple[str, ...] = ()  # the pool's names of them, by slot


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """All that the router needs to know."""

    pool: str
    epoch: int
    token: str
    bind: tuple[str, ...]
    workers_endpoint: str
    slots: int
    models: tuple[ModelSpec, ...]
    overflow: int = 0  # of the slots, the last ones: get work under pressure only
    policy: str = "shortest_wait"
    max_pending: int = 1000
    max_pending_bytes: int = 256 << 20
    max_message_bytes: int = 64 << 20
    max_client_share: float = 1.0
    target_delay_ms: float = 5000.0
    default_timeout_ms: int = 30000
    max_attempts: int = 2
    curve: CurveSpec | None = None  # absent: plaintext
    clients: dict[str, ClientSpec] = dataclasses.field(default_factory=dict)  # by the name of the client's key
    log: LogSpec = LogSpec()
    traces: TraceSpec = TraceSpec()
    stacks_file: str = ""  # where to write the stacks on a signal; "": nowhere
    #: Inherited descriptors of sockets that listen already, the supervisor's: on each of `bind`, and on `workers_endpoint`.
    bind_fds: tuple[int, ...] = ()
    workers_fd: int = -1


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that one worker needs to know."""

    pool: str
    slot: int
    incarnation: int
    token: str
    router_endpoint: str
    device: str  # torch's name inside the process: "cpu" or "cuda:0"
    device_id: str  # the pool's name: "cpu:0" or "GPU-…"
    models: tuple[ModelSpec, ...]
    heartbeat_interval_s: float = 0.2
    load_timeout_s: float = 600.0
    batch_timeout_s: float = 60.0
    max_message_bytes: int = 64 << 20
    search_path: tuple[str, ...] = ()  # put before sys.path for handler modules
    cpus: tuple[int, ...] = ()  # to run on: those next to its card; empty: all
    memory: MemorySpec = MemorySpec()
    log: LogSpec = LogSpec()
    stacks_file: str = ""  # where to write the stacks on a signal; "": nowhere


def to_message(spec: RouterSpec | WorkerSpec) -> dict[str, Any]:
    """Turn a spec into the first channel message."""
    return {"t": "spec", **dataclasses.asdict(spec)}


def router_spec(message: dict[str, Any]) -> RouterSpec:
    """Read a router's spec from its first channel message."""
    values = _values(message)
    values["bind"], values["bind_fds"] = tuple(values["bind"]), tuple(values["bind_fds"])
    values["curve"] = CurveSpec(**values["curve"]) if values["curve"] else None
    values["clients"] = client_specs(values["clients"])
    values["traces"] = TraceSpec(**{**values["traces"], "devices": tuple(values["traces"]["devices"])})
    return RouterSpec(**values)


def worker_spec(message: dict[str, Any]) -> WorkerSpec:
    """Read a worker's spec from its first channel message."""
    values = _values(message)
    values["search_path"] = tuple(values["search_path"])
    values["cpus"] = tuple(values["cpus"])
    values["memory"] = MemorySpec(**values["memory"])
    return WorkerSpec(**values)


def client_specs(values: dict[str, dict[str, Any]]) -> dict[str, ClientSpec]:
    """Read the clients' bounds from a channel message; they also come alone, when a reload changes them."""
    return {name: ClientSpec(**bounds) for name, bounds in values.items()}


def batching_spec(values: dict[str, Any]) -> BatchingSpec:
    """Read batching settings from a channel message; they also come alone, when a reload changes them."""
    return BatchingSpec(**{**values, "length_buckets": tuple(values["length_buckets"])})


def _values(message: dict[str, Any]) -> dict[str, Any]:
    values = {k: v for k, v in message.items() if k != "t"}
    values["log"] = LogSpec(**values["log"])
    values["models"] = tuple(_model(m) for m in values["models"])
    return values


def _model(values: dict[str, Any]) -> ModelSpec:
    return ModelSpec(**{**values, "batching": batching_spec(values["batching"])})
