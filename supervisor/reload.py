"""What a reload can change in a running pool, and what it cannot: the difference of two configurations, sorted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gpupool.config_forms import LEAK_LOOKS, worker_count
from gpupool.spec import BatchingSpec

if TYPE_CHECKING:
    from gpupool.config import Config

#: Keys that take effect at once, as prefixes of the key path. All others are named in the answer as needing a restart.
LIVE: Final = (
    "pool.min_ready", "pool.drain_timeout_s",
    "router.policy", "router.max_pending", "router.max_pending_bytes", "router.max_client_share",
    "router.target_delay_ms", "router.default_timeout_ms",
    "router.curve.clients",
    "supervision.heartbeat_timeout_s", "supervision.stop_timeout_s", "supervision.restart_delays_s", "supervision.stable_after_s",
    "supervision.max_restarts", "supervision.restart_period_s", "supervision.load_timeout_s",
    "supervision.leak_", "supervision.recycle_",
    "batching.", "memory.empty_cache_above", "memory.start_fraction", "memory.cpu_limit_bytes", "degrade", "logs.level", "logs.request_sample",
    "traces.sample",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """Key paths that differ, by what happens to them."""

    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]


#: A [[model]] table may override batching, and its overrides are as live as [batching] itself.
_LIVE_MODEL_KEYS: Final = frozenset(BatchingSpec.__dataclass_fields__)
_TABLES: Final = ("pool", "router", "supervision", "batching", "memory", "http", "logs", "traces")


def difference(old: Config, new: Config) -> Difference:
    """Compare the configuration in force with one that was read."""
    before, after = _flat(_plain(old)), _flat(_plain(new))
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    new_table = (old.router.curve is None) is not (new.router.curve is None)  # encryption begins or ends: a restart, all of it
    live = [k for k in changed if _is_live(k) and not (new_table and k.startswith("router.curve"))]
    return Difference(tuple(live), tuple(k for k in changed if k not in live))


def merged(old: Config, new: Config) -> Config:
    """The configuration in force after a reload: the old one with the live keys of the new one, and nothing else.

    Models are told apart by name; one that the new file does not name keeps its batching until the pool starts anew.
    """
    tables = {}
    for name in _TABLES:
        table, read = getattr(old, name), getattr(new, name)
        live = {key: getattr(read, key) for key in type(table).model_fields if _is_live(f"{name}.{key}")}
        if name == "router" and table.curve and read.curve:
            live["curve"] = table.curve.model_copy(update={"clients": read.curve.clients})
        tables[name] = table.model_copy(update=live)
    read_models = {m.name: m for m in new.model}
    models = tuple(
        m.model_copy(update={key: getattr(read_models[m.name], key) for key in _LIVE_MODEL_KEYS & set(type(m).model_fields)})
        if m.name in read_models
        else m
        for m in old.model
    )
    batching = {s.name: s.batching for s in new.specs}
    specs = tuple(replace(s, batching=batching.get(s.name, s.batching)) for s in old.specs)
    return replace(old, **tables, degrade=new.degrade, model=models, specs=specs)


def contradictions(config: Config) -> list[str]:
    """Say what in a merged configuration does not go together; each of its two halves was checked by itself.

    Not config_checks over again: there a default gives way to what is written, here every value that is in force is as fixed as that.
    """
    s, r, workers = config.supervision, config.router, worker_count(config.pool.devices)
    found = []
    if s.heartbeat_timeout_s <= s.heartbeat_interval_s:
        found.append(
            f"supervision.heartbeat_timeout_s {s.heartbeat_timeout_s:g} needs to be above heartbeat_interval_s, "
            f"which stays {s.heartbeat_interval_s:g} until the pool starts anew"
        )
    if s.leak_window_s < LEAK_LOOKS * s.heartbeat_interval_s:
        found.append(
            f"supervision.leak_window_s {s.leak_window_s:g} needs to be at least {LEAK_LOOKS} times heartbeat_interval_s, "
            f"which stays {s.heartbeat_interval_s:g} until the pool starts anew"
        )
    if r.max_pending_bytes < r.max_message_bytes:
        found.append(
            f"router.max_pending_bytes {r.max_pending_bytes} needs to be at least max_message_bytes, "
            f"which stays {r.max_message_bytes} until the pool starts anew"
        )
    if workers is not None and config.pool.min_ready > workers:
        found.append(f"pool.min_ready {config.pool.min_ready} is above the {workers} devices of the running pool")
    return found


def _is_live(key: str) -> bool:
    return key.startswith(LIVE) or (key.startswith("model[") and key.rpartition(".")[2] in _LIVE_MODEL_KEYS)


def _plain(config: Config) -> dict[str, Any]:
    tables = {name: getattr(config, name).model_dump() for name in _TABLES}
    return {**tables, "degrade": [d.model_dump() for d in config.degrade], "model": [m.model_dump() for m in config.model]}


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    if isinstance(values, Mapping) and path.rpartition(".")[2] != "options":
        return {
            k: v for name, value in values.items() for k, v in _flat(value, f"{path}.{name}" if path else str(name)).items()
        }
    if isinstance(values, list) and values and isinstance(values[0], Mapping):
        return {k: v for n, value in enumerate(values) for k, v in _flat(value, f"{path}[{n}]").items()}
    return {path: values}
