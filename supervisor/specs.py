"""From the configuration to what each process is told, and to the rules the pool decides by."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from gpupool.spec import ClientSpec, CurveSpec, LogSpec, MemorySpec, RouterSpec, TraceSpec, WorkerSpec

from .capacity import DegradeRule
from .leak import LeakPolicy
from .liveness import LivenessPolicy
from .policy import Policy
from .restart import RestartPolicy

if TYPE_CHECKING:
    from gpupool.config import Config
    from gpupool.paths import RuntimeDir

    from .devices import Device
    from .listeners import Listeners


def policy_from(config: Config) -> Policy:
    """The pool's rules."""
    s = config.supervision
    return Policy(
        restart=RestartPolicy(
            delays_s=tuple(s.restart_delays_s), stable_after_s=s.stable_after_s, max_restarts=s.max_restarts, period_s=s.restart_period_s
        ),
        liveness=LivenessPolicy(
            heartbeat_timeout_s=s.heartbeat_timeout_s, load_timeout_s=s.load_timeout_s, batch_timeout_s=s.batch_timeout_s
        ),
        degrade=tuple(DegradeRule(d.healthy_below, d.batch_factor, d.window_factor) for d in config.degrade),
        min_ready=config.pool.min_ready,
        drain_timeout_s=config.pool.drain_timeout_s,
        stop_timeout_s=s.stop_timeout_s,
        recycle_on_leak=s.recycle_on_leak,
        recycle_after_batches=s.recycle_after_batches,
    )  # fmt: skip


def leak_policy_from(config: Config) -> LeakPolicy:
    """What is called a leak."""
    return LeakPolicy(config.supervision.leak_alarm_bytes_per_hour, config.supervision.leak_window_s)


def router_spec_from(
    config: Config,
    *,
    runtime: RuntimeDir,
    listeners: Listeners,
    epoch: int,
    token: str,
    devices: Sequence[Device],
    overflow: int,
    log: LogSpec,
) -> RouterSpec:
    """What the router is told."""
    r = config.router
    curve = CurveSpec(r.curve.secret_key_file, r.curve.authorized_keys_dir) if r.curve else None
    return RouterSpec(
        pool=config.pool.name, epoch=epoch, token=token, bind=tuple(each.address for each in listeners.clients),
        bind_fds=tuple(each.fileno() for each in listeners.clients), workers_endpoint=listeners.workers.address,
        workers_fd=listeners.workers.fileno(), slots=len(devices), overflow=overflow, models=config.specs, policy=r.policy,
        max_pending=r.max_pending, max_pending_bytes=r.max_pending_bytes, max_client_share=r.max_client_share,
        target_delay_ms=r.target_delay_ms,
        max_message_bytes=r.max_message_bytes, default_timeout_ms=r.default_timeout_ms, max_attempts=r.max_attempts, log=log,
        curve=curve, clients=clients_from(config),
        traces=TraceSpec(**config.traces.model_dump(), devices=tuple(device.id for device in devices)),
        stacks_file=str(runtime.stacks("router")),
    )  # fmt: skip


def clients_from(config: Config) -> dict[str, ClientSpec]:
    """The bounds of the clients that the configuration names."""
    curve = config.router.curve
    return {name: ClientSpec(**client.model_dump()) for name, client in curve.clients.items()} if curve else {}


def worker_spec_from(
    config: Config,
    *,
    runtime: RuntimeDir,
    slot: int,
    incarnation: int,
    token: str,
    device: Device,
    log: LogSpec,
    cpus: Collection[int] | None = None,
) -> WorkerSpec:
    """What one worker is told."""
    s = config.supervision
    return WorkerSpec(
        pool=config.pool.name, slot=slot, incarnation=incarnation, token=token, router_endpoint=f"ipc://{runtime.workers}",
        device=device.torch_name, device_id=device.id, models=config.specs, heartbeat_interval_s=s.heartbeat_interval_s,
        load_timeout_s=s.load_timeout_s, batch_timeout_s=s.batch_timeout_s, max_message_bytes=config.router.max_message_bytes,
        search_path=(str(config.source.parent.absolute()),),
        memory=memory_from(config), log=log,
        cpus=tuple(sorted(cpus or ())), stacks_file=str(runtime.stacks(f"worker-{slot}")),
    )  # fmt: skip


def memory_from(config: Config) -> MemorySpec:
    """The memory settings of a worker."""
    m = config.memory
    return MemorySpec(m.limit_fraction, m.empty_cache_above, m.start_fraction, m.cpu_limit_bytes)


def allocator_environment(config: Config) -> dict[str, str]:
    """PyTorch's allocator setting, under its newer and its older name: whichever the installed version reads."""
    if not config.memory.allocator_conf:
        return {}
    return dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), config.memory.allocator_conf)


def heap_environment(device: Device, cpu_limit_bytes: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Have the C library keep no freed blocks aside for each thread, where a worker's memory is limited on a CPU.

    A few such blocks hold the ends of a heap of hundreds of MiB that is free otherwise, and all of it goes on counting against the limit.
    It can be told only when a process starts; an operator's own word on it wins, and other C libraries do not heed it.
    """
    own = inherited.get("GLIBC_TUNABLES", "")
    if device.torch_name != "cpu" or not cpu_limit_bytes or "glibc.malloc.tcache_count" in own:
        return {}
    return {"GLIBC_TUNABLES": ":".join([*filter(None, [own]), "glibc.malloc.tcache_count=0"])}
