"""What must hold between the keys of a configuration: contradictions, and wishes that this version cannot fulfil. Pure.

Each check names the keys that it is about; `config` drops what is about a key that was refused already, for its value is a guess.
A default never contradicts what was written: `min_batch`, `idle_window_ms` and `max_message_bytes` follow their limit (`followed`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgpack

from gpupool.board import LANE_WORDS, MAX_SLOTS
from gpupool.config_errors import ConfigError, shown
from gpupool.config_forms import LEAK_LOOKS, is_loopback, worker_count
from gpupool.config_schema import Batching, Document, Model, Table
from gpupool.keys import is_key

#: Of all models together, packed: they travel to each child in one channel message, beside the rest of its spec.
MAX_OPTIONS_BYTES: Final = 64 * 1024
#: Below this no worker comes up, and how it fails is not always plain.
MIN_CPU_LIMIT_BYTES: Final = 128 << 20
#: Of all models together: each has its word on the board, beside the link's.
MAX_PREPROCESS_THREADS: Final = LANE_WORDS - 1
#: Key, and the key that its default must not exceed.
_FOLLOWERS: Final = {"min_batch": "max_batch", "idle_window_ms": "window_ms", "max_message_bytes": "max_pending_bytes"}

Finding = tuple[tuple[str, ...], ConfigError]


def followed(table: Table, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with each default that its limit's written value undercuts lowered to that value."""
    return {
        key: min(values[key], values[limit])
        for key, limit in _FOLLOWERS.items()
        if key in values and key not in table.model_fields_set
    }


def batching_of(document: Document, model: Model) -> Batching:
    """Return the batching in force for one model: its own keys over those of [batching]."""
    own = {key: value for key in Batching.model_fields if (value := getattr(model, key)) is not None}
    written = {key: getattr(document.batching, key) for key in document.batching.model_fields_set} | own
    batching = Batching(**written)
    return batching.model_copy(update=followed(batching, batching.model_dump()))


def findings(document: Document) -> Iterator[Finding]:
    """Yield everything that is wrong between keys, each with the paths that it is about."""
    yield from _pool(document)
    yield from _router(document)
    yield from _curve(document)
    yield from _supervision(document)
    yield from _batching(document)
    yield from _memory(document)
    yield from _degrade(document)
    yield from _models(document)
    yield from _unsupported(document)


def _finding(path: str, expected: str, found: object, *others: str, hint: str = "") -> Finding:
    return (path, *others), ConfigError(path, expected, "nothing" if found is None else shown(found), hint)


def _pool(document: Document) -> Iterator[Finding]:
    pool = document.pool
    workers = worker_count(pool.devices)
    if workers is not None and pool.min_ready > workers:
        yield _finding("pool.min_ready", f"at most the number of devices, {workers}", pool.min_ready, "pool.devices")
    if workers is not None and workers + pool.cpu_overflow > MAX_SLOTS:
        expected = f"at most {MAX_SLOTS} workers in all, {MAX_SLOTS - workers} beside the {workers} of pool.devices"
        yield _finding("pool.cpu_overflow", expected, pool.cpu_overflow, "pool.devices")


def _router(document: Document) -> Iterator[Finding]:
    router = document.router
    if document.http.bind and f"tcp://{document.http.bind}" in router.bind:
        yield _finding("http.bind", "another port than router.bind's", document.http.bind, "router.bind")
    for i, endpoint in enumerate(router.bind):
        if endpoint in router.bind[:i]:
            yield _finding(f"router.bind[{i}]", "each address once", endpoint)
        if not is_loopback(endpoint) and router.curve is None and not router.allow_plaintext:
            hint = "set router.allow_plaintext = true if everybody on that network may read and send requests"
            yield _finding(f"router.bind[{i}]", "a loopback address, or leave for plaintext", endpoint, "router", hint=hint)
    written = router.model_fields_set
    if "max_message_bytes" in written and router.max_message_bytes > router.max_pending_bytes:
        expected = f"at most router.max_pending_bytes, {router.max_pending_bytes}"
        hint = "a larger message could never be accepted"
        yield _finding("router.max_message_bytes", expected, router.max_message_bytes, "router.max_pending_bytes", hint=hint)


def _curve(document: Document) -> Iterator[Finding]:
    curve = document.router.curve
    if curve is None:
        return
    wanted = {
        "secret_key_file": ("the file of the pool's secret key", "`gpupool keygen` makes one"),
        "authorized_keys_dir": (
            "the folder of the clients' public keys",
            "without it anybody could be a client; no key in it: nobody",
        ),
    }
    for key, (expected, hint) in wanted.items():
        value = getattr(curve, key)
        if not value:
            yield _finding(f"router.curve.{key}", expected, None, hint=hint)
        elif is_key(value):  # not shown: it may be the secret one
            yield _finding(f"router.curve.{key}", expected, "a key", hint="write the key into a file and give its path")


def _supervision(document: Document) -> Iterator[Finding]:
    rules = document.supervision
    if rules.heartbeat_timeout_s <= rules.heartbeat_interval_s:
        yield _finding(
            "supervision.heartbeat_timeout_s",
            f"more than heartbeat_interval_s, {rules.heartbeat_interval_s}",
            rules.heartbeat_timeout_s,
            "supervision.heartbeat_interval_s",
            hint="several intervals, or every late beat counts as a death",
        )
    if rules.leak_window_s < (shortest := LEAK_LOOKS * rules.heartbeat_interval_s):
        yield _finding(
            "supervision.leak_window_s",
            f"at least {LEAK_LOOKS} times heartbeat_interval_s, {shortest:g}",
            rules.leak_window_s,
            "supervision.heartbeat_interval_s",
            hint="workers tell what they hold with each heartbeat, and that often it must be known",
        )


def _batching(document: Document) -> Iterator[Finding]:
    tables: list[tuple[str, Table, Batching]] = [("batching", document.batching, document.batching)]
    tables += [(f"model[{i}]", model, batching_of(document, model)) for i, model in enumerate(document.model)]
    for name, table, batching in tables:

        def path(key: str, name: str = name, table: Table = table) -> str:
            return f"{name}.{key}" if key in table.model_fields_set else f"batching.{key}"

        for low, high in (("min_batch", "max_batch"), ("idle_window_ms", "window_ms")):
            # What [batching] alone gets wrong is told there, once.
            if {low, high} & table.model_fields_set and low in batching.model_fields_set:
                value, limit = getattr(batching, low), getattr(batching, high)
                if value > limit:
                    hint = f"{path(high)} is {limit}"
                    yield _finding(path(low), f"at most {high}, {limit}", value, path(high), hint=hint)
        buckets = batching.length_buckets
        if "length_buckets" in table.model_fields_set and any(a >= b for a, b in itertools.pairwise(buckets)):
            yield _finding(f"{name}.length_buckets", "upper bounds that grow", buckets)


def _memory(document: Document) -> Iterator[Finding]:
    limit = document.memory.cpu_limit_bytes
    if 0 < limit < MIN_CPU_LIMIT_BYTES:
        hint = "a worker takes nearly that before it has a model, and torch 150 MiB more"
        yield _finding("memory.cpu_limit_bytes", f"0 for no limit, or at least {MIN_CPU_LIMIT_BYTES}", limit, hint=hint)


def _degrade(document: Document) -> Iterator[Finding]:
    rules = document.degrade
    for i, (before, rule) in enumerate(itertools.pairwise(rules), start=1):
        if rule.healthy_below >= before.healthy_below:
            yield _finding(
                f"degrade[{i}].healthy_below",
                f"less than the rule before it, {before.healthy_below}",
                rule.healthy_below,
                f"degrade[{i - 1}].healthy_below",
                hint="the last rule that holds applies, so this one would hide the one before",
            )


def _models(document: Document) -> Iterator[Finding]:
    if not document.model:
        yield _finding("model", "at least one [[model]]", None, hint='a [[model]] has a name and a "path" or a "handler"')
    names = Counter(model.name for model in document.model)
    for i, model in enumerate(document.model):
        path = f"model[{i}]"
        if bool(model.path) == bool(model.handler):
            found = [key for key in ("path", "handler") if getattr(model, key)] or None
            yield _finding(path, 'either "path" (a model directory) or "handler" (a class)', found)
        if names[model.name] > 1:
            yield _finding(f"{path}.name", "a name that no other model has", model.name)
            names[model.name] = 0
    threads = {f"model[{i}].preprocess_threads": model.preprocess_threads for i, model in enumerate(document.model)}
    if (total := sum(threads.values())) > MAX_PREPROCESS_THREADS:
        path = max(threads, key=lambda each: threads[each])
        yield _finding(path, f"at most {MAX_PREPROCESS_THREADS} threads in all models together", total, *threads)
    yield from options_findings({f"model[{i}].options": model.options for i, model in enumerate(document.model)})


def options_findings(options: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Yield what is wrong with the options of all models, by key path: they must pack, and fit together."""
    total = 0
    for path, values in options.items():
        try:
            total += len(msgpack.packb(values))
        except (TypeError, ValueError, OverflowError) as e:
            hint = f"{e}; write dates and times as text"
            yield _finding(path, "text, numbers up to 64 bits, true, false, lists and tables", values, hint=hint)
    if total > MAX_OPTIONS_BYTES:
        hint = "put large values into a file and give its path"
        expected = f"at most {MAX_OPTIONS_BYTES} bytes of options in all models together"
        yield (tuple(options), ConfigError(next(iter(options)), expected, f"{total} bytes", hint))


def _unsupported(document: Document) -> Iterator[Finding]:
    wishes = [
        (f"model[{i}].fallback", '"none"', model.fallback) for i, model in enumerate(document.model) if model.fallback != "none"
    ]
    for path, expected, found in wishes:
        yield _finding(path, expected, found, hint="it is not supported yet")
