"""The tables of a configuration file: every key with its type, range and default. What holds between keys stands in config_checks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from gpupool.config_forms import (
    Devices,
    parse_address,
    parse_allocator,
    parse_devices,
    parse_endpoint,
    parse_handler,
    parse_path,
    parse_url,
)
from gpupool.keys import NAME

#: A day: a longer wait is a slip of the unit, not a wish.
_DAY_S = 86400.0

#: They travel to the router in one channel message, beside the options of all models.
MAX_CLIENTS = 512

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
ClientName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Bytes = Annotated[int, Field(ge=1024, le=1 << 40)]
Seconds = Annotated[float, Field(gt=0, le=_DAY_S)]
Share = Annotated[float, Field(gt=0, le=1)]
Window = Annotated[float, Field(ge=0, le=10_000)]
Objective = Annotated[float, Field(ge=0, le=3_600_000)]
BatchSize = Annotated[int, Field(ge=1, le=65_536)]
Address = Annotated[str, PlainValidator(parse_address)]
PathText = Annotated[str, PlainValidator(parse_path)]
Handler = Annotated[str, PlainValidator(parse_handler)]
#: TOML has lists only; inside they are tuples, as all values of a configuration are immutable.
Lengths = Annotated[tuple[Annotated[int, Field(ge=1, le=100_000_000)], ...], Field(strict=False, max_length=64)]


class Table(BaseModel):
    """What holds for every table: no unknown keys, no conversions (an integer may stand for a number), no NaN, no changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class Pool(Table):
    """[pool]."""

    name: Name = "default"
    runtime_dir: PathText = ""
    devices: Annotated[Devices, PlainValidator(parse_devices)] = "auto"
    cpu_overflow: Annotated[int, Field(ge=0, le=256)] = 0
    min_ready: Annotated[int, Field(ge=1, le=1024)] = 1
    drain_timeout_s: Seconds = 30.0


class CurveClient(Table):
    """[router.curve.clients.NAME]; None means that the pool's value holds."""

    max_pending: Count | None = None
    max_pending_bytes: Bytes | None = None
    max_priority: Annotated[int, Field(ge=0, le=9)] | None = None


class Curve(Table):
    """[router.curve]."""

    secret_key_file: PathText = ""
    authorized_keys_dir: PathText = ""
    clients: Annotated[dict[ClientName, CurveClient], Field(max_length=MAX_CLIENTS)] = Field(default_factory=dict)


class Router(Table):
    """[router]."""

    bind: Annotated[
        tuple[Annotated[str, PlainValidator(parse_endpoint)], ...], Field(strict=False, min_length=1, max_length=16)
    ] = ("tcp://127.0.0.1:5555",)
    policy: Literal["shortest_wait", "shortest_queue", "round_robin"] = "shortest_wait"
    max_pending: Count = 1000
    max_pending_bytes: Bytes = 268435456
    max_message_bytes: Annotated[int, Field(ge=1024, le=(1 << 31) - 1)] = 67108864
    max_client_share: Share = 1.0
    target_delay_ms: Annotated[float, Field(ge=0, le=86_400_000)] = 5000.0
    default_timeout_ms: Annotated[int, Field(ge=1, le=86_400_000)] = 30000
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 2
    allow_plaintext: bool = False
    curve: Curve | None = None


class Supervision(Table):
    """[supervision]."""

    heartbeat_interval_s: Annotated[float, Field(ge=0.01, le=60)] = 0.2
    heartbeat_timeout_s: Seconds = 2.0
    load_timeout_s: Seconds = 600.0
    batch_timeout_s: Seconds = 60.0
    stop_timeout_s: Seconds = 10.0
    restart_delays_s: Annotated[
        tuple[Annotated[float, Field(ge=0, le=_DAY_S)], ...], Field(strict=False, min_length=1, max_length=64)
    ] = (0.0, 5.0, 30.0, 60.0)
    stable_after_s: Seconds = 300.0
    max_restarts: Annotated[int, Field(ge=0, le=100_000)] = 5
    restart_period_s: Seconds = 600.0
    leak_alarm_bytes_per_hour: Annotated[int, Field(ge=0, le=1 << 40)] = 67108864
    leak_window_s: Annotated[float, Field(ge=1, le=7 * _DAY_S)] = 3600.0
    recycle_on_leak: bool = False
    recycle_after_batches: Annotated[int, Field(ge=0, le=10**15)] = 0


class Batching(Table):
    """[batching]."""

    max_batch: BatchSize = 32
    min_batch: BatchSize = 8
    window_ms: Window = 5.0
    idle_window_ms: Window = 1.0
    adaptive: bool = True
    max_queue: Count = 100
    length_buckets: Lengths = ()
    p99_ms: Objective = 0.0


class Memory(Table):
    """[memory]."""

    limit_fraction: Share = 0.9
    empty_cache_above: Share = 0.9
    start_fraction: Share = 0.7
    cpu_limit_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 0
    allocator_conf: Annotated[str, PlainValidator(parse_allocator)] = ""


class Degrade(Table):
    """One [[degrade]] rule."""

    healthy_below: Share
    batch_factor: Share = 1.0
    window_factor: Annotated[float, Field(ge=0, le=1)] = 1.0


class Model(Table):
    """One [[model]]; the keys of [batching] may stand here too, None means that the table's value holds."""

    name: Name
    path: PathText = ""
    handler: Handler = ""
    options: dict[str, Any] = Field(default_factory=dict)
    fallback: Literal["none", "default", "cached"] = "none"
    preprocess_threads: Annotated[int, Field(ge=1, le=16)] = 1
    max_batch: BatchSize | None = None
    min_batch: BatchSize | None = None
    window_ms: Window | None = None
    idle_window_ms: Window | None = None
    adaptive: bool | None = None
    max_queue: Count | None = None
    length_buckets: Lengths | None = None
    p99_ms: Objective | None = None


class Http(Table):
    """[http]."""

    bind: Address = "127.0.0.1:9555"


class Logs(Table):
    """[logs]."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"
    file: PathText = ""
    fluentd: Address = ""
    request_sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    queue_size: Annotated[int, Field(ge=1, le=10_000_000)] = 10000


class Traces(Table):
    """[traces]."""

    endpoint: Annotated[str, PlainValidator(parse_url)] = ""
    sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    max_flagged_per_s: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    service_name: Name = "gpupool"
    headers_file: PathText = ""


DEFAULT_DEGRADE = (
    Degrade(healthy_below=1.0, batch_factor=0.75, window_factor=0.5),
    Degrade(healthy_below=0.51, batch_factor=0.5, window_factor=0.2),
)


class Document(Table):
    """A whole file."""

    pool: Pool = Pool()
    router: Router = Router()
    supervision: Supervision = Supervision()
    batching: Batching = Batching()
    memory: Memory = Memory()
    degrade: Annotated[tuple[Degrade, ...], Field(strict=False, max_length=16)] = DEFAULT_DEGRADE
    model: Annotated[tuple[Model, ...], Field(strict=False, max_length=64)] = ()
    http: Http = Http()
    logs: Logs = Logs()
    traces: Traces = Traces()
