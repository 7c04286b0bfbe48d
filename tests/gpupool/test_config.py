"""Configurations that must be refused, with what they are told; and what the good ones become."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gpupool.config import Config, ConfigError, ConfigErrors, load_config, log_spec, model_specs
from gpupool.config_schema import Batching, Document, Model
from gpupool.keys import certificate
from gpupool.paths import ENV_DIR
from gpupool.spec import BatchingSpec, LogSpec

CURVE = '[router.curve]\nsecret_key_file = "{}"\nauthorized_keys_dir = "{}"\n'
MODEL = '[[model]]\nname = "m"\nhandler = "toys:Echo"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(ENV_DIR, raising=False)
    (tmp_path / "toys.py").write_text("class Echo:\n    def forward(self, batch): return batch\n")
    for name, mode in (("good", 0o600), ("loose", 0o640)):
        (tmp_path / f"{name}.key_secret").write_text(certificate("0" * 40, "0" * 40))
        (tmp_path / f"{name}.key_secret").chmod(mode)
    (tmp_path / "good.key").write_text(certificate("0" * 40))
    (tmp_path / "good.key").chmod(0o600)
    return tmp_path


def load(folder: Path, text: str, *, model: str = MODEL) -> Config:
    file = folder / "pool.toml"
    file.write_text(text + "\n" + model)
    return load_config(file)


def refused(folder: Path, text: str, *, model: str = MODEL) -> list[ConfigError]:
    with pytest.raises(ConfigErrors) as caught:
        load(folder, text, model=model)
    return caught.value.errors


# Each: the file, the key path that must be named, and words that expected, found and hint must hold together.
MISTAKES: dict[str, tuple[str, str, str]] = {
    "misspelt key": ("[pool]\ndevicez = 1", "pool.devicez", 'did you mean "devices"?'),
    "misspelt table": ("[batchin]\nmax_batch = 1", "batchin", 'did you mean "batching"?'),
    "key of another table": ("[pool]\nmax_batch = 8", "pool.max_batch", "it belongs to [batching]"),
    "key of two other tables": ('[pool]\nbind = "x"', "pool.bind", "it belongs to [router] or [http]"),
    "key outside any table": ("max_pending = 8", "max_pending", "it belongs to [router]"),
    "misspelt key of another table": ("[pool]\nmax_pendin = 8", "pool.max_pendin", 'did you mean "max_pending" in [router]?'),
    "key like nothing": ("[logs]\nxyzzy = 8", "logs.xyzzy", "the nearest known one is"),
    "number in quotes": ('[batching]\nmax_batch = "8"', "batching.max_batch", "write the number without quotes"),
    "boolean for integer": ("[batching]\nmax_batch = true", "batching.max_batch", "an integer found true"),
    "boolean for number": ("[pool]\ndrain_timeout_s = true", "pool.drain_timeout_s", "a number found true"),
    "float for integer": ("[batching]\nmax_batch = 8.0", "batching.max_batch", "an integer found 8.0"),
    "text for boolean": ('[batching]\nadaptive = "yes"', "batching.adaptive", 'true or false found "yes"'),
    "number for text": ("[pool]\nname = 3", "pool.name", "text in quotes found 3"),
    "value for table": ("pool = 3", "pool", "a table found 3"),
    "table for list": ('[model]\nname = "m"', "model", "write [[model]] with double brackets"),
    "date for number": ("[pool]\ndrain_timeout_s = 2020-01-01", "pool.drain_timeout_s", "a number found 2020-01-01"),
    "zero": ("[batching]\nmax_batch = 0", "batching.max_batch", "at least 1 found 0"),
    "zero queue": ("[batching]\nmax_queue = 0", "batching.max_queue", "at least 1 found 0"),
    "no stop time": ("[supervision]\nstop_timeout_s = 0", "supervision.stop_timeout_s", "more than 0"),
    "milliseconds for seconds": ("[pool]\ndrain_timeout_s = 90000", "pool.drain_timeout_s", "at most 86400"),
    "infinity": ("[batching]\nwindow_ms = inf", "batching.window_ms", "a finite number"),
    "not a number": ("[memory]\nlimit_fraction = nan", "memory.limit_fraction", "a finite number"),
    "share above one": ("[memory]\nlimit_fraction = 1.5", "memory.limit_fraction", "at most 1 found 1.5"),
    "negative delay": ("[supervision]\nrestart_delays_s = [0, -1]", "supervision.restart_delays_s[1]", "at least 0 found -1"),
    "no delays": ("[supervision]\nrestart_delays_s = []", "supervision.restart_delays_s", "a list of at least 1"),
    "unknown policy": ('[router]\npolicy = "shortest_qeue"', "router.policy", 'did you mean "shortest_queue"?'),
    "unknown level": ('[logs]\nlevel = "warn"', "logs.level", 'did you mean "warning"?'),
    "no preprocess thread": (
        "[[model]]\nname = 'a'\nhandler = 'toys:Echo'\npreprocess_threads = 0",
        "model[0].preprocess_threads",
        "at least 1",
    ),
    "many preprocess threads": (
        "[[model]]\nname = 'a'\nhandler = 'toys:Echo'\npreprocess_threads = 17",
        "model[0].preprocess_threads",
        "at most 16",
    ),
    "min above max": ("[batching]\nmax_batch = 4\nmin_batch = 8", "batching.min_batch", "at most max_batch, 4 found 8"),
    "min above default max": ("[batching]\nmin_batch = 40", "batching.min_batch", "at most max_batch, 32 found 40"),
    "idle above window": ("[batching]\nidle_window_ms = 9", "batching.idle_window_ms", "at most window_ms, 5.0 found 9"),
    "buckets that fall": ("[batching]\nlength_buckets = [64, 32]", "batching.length_buckets", "that grow found [64, 32]"),
    "beat slower than patience": (
        "[supervision]\nheartbeat_interval_s = 5.0\nheartbeat_timeout_s = 1.0",
        "supervision.heartbeat_timeout_s",
        "more than heartbeat_interval_s, 5.0 found 1.0",
    ),
    "degrade rule that hides one": (
        "[[degrade]]\nhealthy_below = 0.5\n[[degrade]]\nhealthy_below = 0.9",
        "degrade[1].healthy_below",
        "less than the rule before it, 0.5 found 0.9",
    ),
    "degrade rule without bound": ("[[degrade]]\nbatch_factor = 0.5", "degrade[0].healthy_below", "it has no default"),
    "network without encryption": ('[router]\nbind = ["tcp://0.0.0.0:5"]', "router.bind[0]", "router.allow_plaintext = true"),
    "every interface": ('[router]\nbind = ["tcp://*:5"]', "router.bind[0]", "a loopback address"),
    "host name": ('[router]\nbind = ["tcp://gpu7:5"]', "router.bind[0]", "a loopback address"),
    "unknown scheme": ('[router]\nbind = ["udp://127.0.0.1:5"]', "router.bind[0]", '"tcp://" or "ipc://" found "udp'),
    "no port": ('[router]\nbind = ["tcp://127.0.0.1"]', "router.bind[0]", '"tcp://HOST:PORT"'),
    "port too high": ('[router]\nbind = ["tcp://127.0.0.1:65536"]', "router.bind[0]", "a port up to 65535"),
    "IPv6": ('[router]\nbind = ["tcp://[::1]:5"]', "router.bind[0]", "IPv6 is not supported yet"),
    "abstract socket": ('[router]\nbind = ["ipc://@x"]', "router.bind[0]", "abstract sockets are not supported"),
    "long socket path": (f'[router]\nbind = ["ipc:///{"x" * 107}"]', "router.bind[0]", "at most 107 bytes found 108"),
    "bound twice": ('[router]\nbind = ["ipc://a", "ipc://a"]', "router.bind[1]", "each address once"),
    "bound nowhere": ("[router]\nbind = []", "router.bind", "a list of at least 1"),
    "text for list": ('[router]\nbind = "tcp://127.0.0.1:1"', "router.bind", "a list"),
    "message above all pending": (
        "[router]\nmax_message_bytes = 5000\nmax_pending_bytes = 4000",
        "router.max_message_bytes",
        "at most router.max_pending_bytes, 4000 found 5000",
    ),
    "http without port": ('[http]\nbind = "localhost"', "http.bind", '"HOST:PORT"'),
    "device twice": ("[pool]\ndevices = [1, 0, 1]", "pool.devices", "1 stands there twice"),
    "device twice by UUID": (
        '[pool]\ndevices = ["GPU-01234567-89ab", "GPU-01234567"]',
        "pool.devices",
        "'GPU-01234567' stands there twice",
    ),
    "no device": ("[pool]\ndevices = []", "pool.devices", "at least one device"),
    "empty device": ('[pool]\ndevices = ""', "pool.devices", "empty does not mean all"),
    "index in quotes": ('[pool]\ndevices = ["0"]', "pool.devices", "write indexes without quotes"),
    "negative index": ("[pool]\ndevices = [-1]", "pool.devices", "-1 is neither"),
    "boolean device": ("[pool]\ndevices = [true]", "pool.devices", "True is neither"),
    "torch's name for a device": ('[pool]\ndevices = ["cuda:0"]', "pool.devices", "'cuda:0' is neither"),
    "one UUID outside a list": ('[pool]\ndevices = "GPU-01234567"', "pool.devices", "GPUs stand in a list"),
    "cpu without count": ('[pool]\ndevices = "cpu"', "pool.devices", 'write "cpu:1"'),
    "no CPU": ('[pool]\ndevices = "cpu:0"', "pool.devices", "N from 1 to 256"),
    "too many CPUs": ('[pool]\ndevices = "cpu:257"', "pool.devices", "N from 1 to 256"),
    "more ready than there are": ('[pool]\ndevices = "cpu:2"\nmin_ready = 3', "pool.min_ready", "number of devices, 2 found 3"),
    "none ready": ("[pool]\nmin_ready = 0", "pool.min_ready", "at least 1"),
    "long runtime directory": (f'[pool]\nruntime_dir = "/{"r" * 120}"', "pool.runtime_dir", "the limit is 107"),
    "path with NUL": ('[pool]\nruntime_dir = "a\\u0000b"', "pool.runtime_dir", "a path"),
    "log file in no folder": ('[logs]\nfile = "no/such/log"', "logs.file", "an existing folder"),
    "allocator text": ('[memory]\nallocator_conf = "on"', "memory.allocator_conf", "option:value"),
    "CURVE without a secret key": ('[router.curve]\nauthorized_keys_dir = "."', "router.curve.secret_key_file", "keygen"),
    "CURVE for anybody": ('[router.curve]\nsecret_key_file = "good.key_secret"', "router.curve.authorized_keys_dir", "anybody"),
    "CURVE without its file": (CURVE.format("none", "."), "router.curve.secret_key_file", "No such file"),
    "CURVE with a public file": (CURVE.format("good.key", "."), "router.curve.secret_key_file", "no secret key"),
    "CURVE with a loose file": (CURVE.format("loose.key_secret", "."), "router.curve.secret_key_file", "chmod 600"),
    "CURVE with a key for a path": (
        CURVE.format("0" * 40, "."),
        "router.curve.secret_key_file",
        'found "a key" write the key into a file',
    ),
    "CURVE without its folder": (
        CURVE.format("good.key_secret", "no"),
        "router.curve.authorized_keys_dir",
        "a readable folder",
    ),
    "bound of a client": (
        CURVE.format("good.key_secret", ".") + "[router.curve.clients.a]\nmax_priority = 10",
        "router.curve.clients.a.max_priority",
        "at most 9",
    ),
    "slip in a client's bounds": (
        CURVE.format("good.key_secret", ".") + "[router.curve.clients.a]\nmax_prority = 1",
        "router.curve.clients.a.max_prority",
        'did you mean "max_priority"',
    ),
    "name of a client": (
        CURVE.format("good.key_secret", ".") + '[router.curve.clients."a b"]\nmax_priority = 1',
        "router.curve.clients.a b.[key]",
        "of the form",
    ),
    "Fluentd without a port": ('[logs]\nfluentd = "localhost"', "logs.fluentd", "with a port"),
    "more request lines than there are": ("[logs]\nrequest_sample = 1.5", "logs.request_sample", "at most 1"),
    "memory below any worker": ("[memory]\ncpu_limit_bytes = 1000", "memory.cpu_limit_bytes", "at least 134217728"),
    "one port twice": ('[http]\nbind = "127.0.0.1:5555"', "http.bind", "another port than router.bind's"),
    "a leak window shorter than its cells": (
        "[supervision]\nleak_window_s = 7.0",
        "supervision.leak_window_s",
        "at least 36 times",
    ),
    "more workers than the board has": (
        '[pool]\ndevices = "cpu:200"\ncpu_overflow = 57',
        "pool.cpu_overflow",
        "56 beside the 200",
    ),
}


@pytest.mark.parametrize(("text", "path", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_refused_with_its_path_and_a_hint(folder: Path, text: str, path: str, words: str) -> None:
    errors = refused(folder, text, model="" if text.startswith("[model]") else MODEL)

    assert [error.path for error in errors] == [path]
    (error,) = errors
    assert words in f"{error.expected} found {error.found} {error.hint}"
    assert error.hint == "" or str(error).endswith(error.hint)


MODEL_MISTAKES: dict[str, tuple[str, str, str]] = {
    "no model": ("", "model", "at least one [[model]] found nothing"),
    "no name": ('[[model]]\nhandler = "toys:Echo"', "model[0].name", "it has no default"),
    "neither path nor handler": ('[[model]]\nname = "m"', "model[0]", 'either "path"'),
    "both path and handler": ('[[model]]\nname = "m"\npath = "."\nhandler = "toys:Echo"', "model[0]", 'either "path"'),
    "same name twice": (MODEL + MODEL, "model[0].name", "a name that no other model has"),
    "misspelt key": (MODEL + "max_bach = 3", "model[0].max_bach", 'did you mean "max_batch"?'),
    "no colon": ('[[model]]\nname = "m"\nhandler = "toys.Echo"', "model[0].handler", 'did you mean "toys:Echo"?'),
    "no module": ('[[model]]\nname = "m"\nhandler = "nothere.x:Echo"', "model[0].handler", "no such module"),
    "no class": ('[[model]]\nname = "m"\nhandler = "toys:Ecko"', "model[0].handler", 'but a "Echo"'),
    "no directory": ('[[model]]\nname = "m"\npath = "models/m"', "model[0].path", "a model directory"),
    "own min above own max": (MODEL + "min_batch = 9\nmax_batch = 4", "model[0].min_batch", "at most max_batch, 4 found 9"),
    "own min above the pool's max": (MODEL + "min_batch = 50", "model[0].min_batch", "batching.max_batch is 32"),
    "own buckets fall": (MODEL + "length_buckets = [2, 2]", "model[0].length_buckets", "upper bounds that grow"),
    "fallback": (MODEL + 'fallback = "cached"', "model[0].fallback", "not supported yet"),
    "unknown fallback": (MODEL + 'fallback = "cache"', "model[0].fallback", 'did you mean "cached"?'),
    "date in options": (MODEL + "options = {at = 2020-01-01}", "model[0].options", "write dates and times as text"),
    "huge number in options": (MODEL + "options = {n = 99999999999999999999}", "model[0].options", "numbers up to 64 bits"),
    "large options": (MODEL + f'options = {{text = "{"x" * 65536}"}}', "model[0].options", "at most 65536 bytes"),
}


@pytest.mark.parametrize(("text", "path", "words"), MODEL_MISTAKES.values(), ids=MODEL_MISTAKES.keys())
def test_a_mistake_in_a_model_is_refused_with_its_path_and_a_hint(folder: Path, text: str, path: str, words: str) -> None:
    errors = refused(folder, "", model=text)

    assert [error.path for error in errors] == [path]
    (error,) = errors
    assert words in f"{error.expected} found {error.found} {error.hint}"


def test_one_mistake_hides_no_other(folder: Path) -> None:
    text = """
        [pool]
        devicez = "cpu:2"
        min_ready = "1"
        [batching]
        max_batch = 4
        min_batch = 8
        windo_ms = 3
        [supervision]
        heartbeat_interval_s = 3
        load_timeout_s = false
        [logs]
        fluentd = "a"
    """
    model = '[[model]]\nname = 1\nhandler = "toys:Echo"\n[[model]]\nname = "b"\nhandler = "toys:Ecko"\n'

    paths = {error.path for error in refused(folder, text, model=model)}

    assert paths == {
        "pool.devicez",
        "pool.min_ready",
        "batching.min_batch",
        "batching.windo_ms",
        "supervision.heartbeat_timeout_s",
        "supervision.load_timeout_s",
        "logs.fluentd",
        "model[0].name",
        "model[1].handler",
    }


def test_a_refused_value_causes_no_second_error(folder: Path) -> None:
    """The value that stands in for it is a guess, and must not be held against the rest of the file."""
    errors = refused(folder, '[batching]\nmax_batch = "64"\nmin_batch = 40\n')

    assert [error.path for error in errors] == ["batching.max_batch"]


def test_a_contradiction_across_tables_names_both_keys(folder: Path) -> None:
    (error,) = refused(folder, "[batching]\nmin_batch = 8\n", model=MODEL + "max_batch = 4\n")

    assert error.path == "batching.min_batch"
    assert "model[0].max_batch" in error.hint


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[pool]\nname = ", "line 2, column 8"),
        ("[pool]\nname = default\n", "line 2, column 8"),
        ("[pool\n", "line 1, column 6"),
        ("[pool]\n[pool]\n", "line 2, column 6"),
        ('[pool]\nname = "x', "line 2, column 10"),
        ("a = 1\na = 2\n", "line 2, column 6"),
    ],
)
def test_a_syntax_error_has_line_and_column(folder: Path, text: str, where: str) -> None:
    (error,) = _refused_raw(folder, text.encode())

    assert error.path == where
    assert error.expected == "valid TOML"


def _refused_raw(folder: Path, data: bytes) -> list[ConfigError]:
    file = folder / "raw.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigErrors) as caught:
        load_config(file)
    return caught.value.errors


def test_bytes_that_are_no_text_are_refused_with_line_and_column(folder: Path) -> None:
    (error,) = _refused_raw(folder, b'[pool]\nname = "\xff"\n')

    assert (error.path, error.expected, error.found) == ("line 2, column 9", "UTF-8 text", "byte 0xff")


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_config(folder / name)

    assert caught.value.errors[0].path == "file"
    assert str(folder) in str(caught.value)


def test_a_huge_file_is_refused_unread(folder: Path) -> None:
    (error,) = _refused_raw(folder, b"#" * (1 << 20) + b"\n")

    assert error.expected == "at most 1048576 bytes"


def test_defaults_are_those_of_the_contract(folder: Path) -> None:
    config = load(folder, "")

    assert config.pool.devices == "auto"
    assert config.router.bind == ("tcp://127.0.0.1:5555",)
    assert config.supervision.restart_delays_s == (0.0, 5.0, 30.0, 60.0)
    assert [(r.healthy_below, r.batch_factor, r.window_factor) for r in config.degrade] == [(1.0, 0.75, 0.5), (0.51, 0.5, 0.2)]
    assert model_specs(config)[0].batching == BatchingSpec()
    assert log_spec(config) == LogSpec()
    assert config.source == folder / "pool.toml"


def test_relative_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")

    config = load(folder, '[pool]\nruntime_dir = "run"\n[router]\nbind = ["ipc://in.sock"]\n[logs]\nfile = "log"\n')

    assert config.runtime.path == folder / "run"
    assert config.router.bind == (f"ipc://{folder}/in.sock",)
    assert config.logs.file == str(folder / "log")


def test_the_environment_goes_before_the_file_for_the_runtime_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_DIR, "/somewhere/else")

    assert load(folder, '[pool]\nruntime_dir = "run"\n').runtime.path == Path("/somewhere/else")


def test_an_empty_runtime_directory_becomes_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")

    assert load(folder, "").pool.runtime_dir == "/run/user/1234/gpupool"


def test_a_model_overrides_batching_key_by_key(folder: Path) -> None:
    config = load(
        folder, "[batching]\nmax_batch = 16\nwindow_ms = 3\n", model=MODEL + "window_ms = 2\nlength_buckets = [8, 16]\n"
    )

    assert model_specs(config)[0].batching == BatchingSpec(max_batch=16, window_ms=2, length_buckets=(8, 16))


def test_a_default_follows_its_limit_down(folder: Path) -> None:
    text = "[batching]\nmax_batch = 4\nwindow_ms = 0\n[router]\nmax_pending_bytes = 2000\n"

    config = load(folder, text, model=MODEL + "max_batch = 2\n" + MODEL.replace('"m"', '"n"'))

    assert (config.batching.min_batch, config.batching.idle_window_ms) == (4, 0)
    assert config.router.max_message_bytes == 2000
    assert [spec.batching.min_batch for spec in model_specs(config)] == [2, 4]


def test_a_default_does_not_follow_its_limit_up(folder: Path) -> None:
    assert load(folder, "[batching]\nmax_batch = 64\nwindow_ms = 50\n").batching.min_batch == 8


def test_an_integer_may_stand_for_a_number(folder: Path) -> None:
    assert load(folder, "[pool]\ndrain_timeout_s = 5\n").pool.drain_timeout_s == 5.0


def test_plaintext_may_be_asked_for(folder: Path) -> None:
    config = load(folder, '[router]\nbind = ["tcp://0.0.0.0:5555", "tcp://127.0.0.1:*"]\nallow_plaintext = true\n')

    assert config.router.bind == ("tcp://0.0.0.0:5555", "tcp://127.0.0.1:*")


def test_degrade_can_be_turned_off(folder: Path) -> None:
    assert load(folder, "degrade = []\n").degrade == ()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"cpu:4"', "cpu:4"),
        ("[2, 0]", (2, 0)),
        (
            '["GPU-0123abcd-4567-89ab-cdef-0123456789ab", "MIG-0123abcd-4567-89ab-cdef-0123456789ab"]',
            ("GPU-0123abcd-4567-89ab-cdef-0123456789ab", "MIG-0123abcd-4567-89ab-cdef-0123456789ab"),
        ),
        ('["MIG-GPU-0123abcd-4567-89ab-cdef-0123456789ab/1/0"]', ("MIG-GPU-0123abcd-4567-89ab-cdef-0123456789ab/1/0",)),
    ],
)
def test_devices_may_be_counted_or_listed(folder: Path, written: str, value: object) -> None:
    assert load(folder, f"[pool]\ndevices = {written}\n").pool.devices == value


def test_a_handler_is_found_without_running_it(folder: Path) -> None:
    (folder / "explosive.py").write_text("raise SystemExit('imported')\nclass Echo: ...\n")

    (spec,) = model_specs(load(folder, "", model=MODEL.replace("toys", "explosive")))

    assert (spec.handler, spec.version, spec.directory) == ("explosive:Echo", "1", "")


def test_a_handler_is_found_on_the_python_path(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "elsewhere.py").write_text("class Echo: ...\n")
    monkeypatch.syspath_prepend(other)

    assert load(folder, "", model=MODEL.replace("toys", "elsewhere")).specs[0].handler == "elsewhere:Echo"


def test_every_key_of_batching_may_stand_in_a_model() -> None:
    assert Batching.model_fields.keys() <= Model.model_fields.keys()


def _keys(schema: type[BaseModel]) -> list[tuple[str, str]]:
    tables = ["pool", "router", "supervision", "batching", "memory", "http", "logs"]
    return [(table, key) for table in tables for key in schema.model_fields[table].annotation.model_fields]  # type: ignore[union-attr]


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(_keys(Document)), _VALUES, max_size=6))
def test_whatever_stands_there_is_read_or_refused_in_words(values: dict[tuple[str, str], Any]) -> None:
    raw: dict[str, Any] = {"model": [{"name": "m", "handler": "json:JSONDecoder"}]}
    for (table, key), value in values.items():
        raw.setdefault(table, {})[key] = value

    with mock.patch("gpupool.config._parsed", return_value=raw):
        try:
            config = load_config(Path("/nowhere/pool.toml"))
        except ConfigErrors as refusal:
            assert refusal.errors
            for error in refusal.errors:
                assert error.path and error.expected and error.found
                assert error.path.split(".")[0].split("[")[0] in {*raw, "batching"}
        else:
            assert config.specs[0].batching.min_batch <= config.specs[0].batching.max_batch


def test_keys_are_found_beside_the_file_and_an_open_address_needs_no_leave_for_plaintext(folder: Path) -> None:
    text = (
        '[router]\nbind = ["tcp://0.0.0.0:5555"]\n'
        + CURVE.format("good.key_secret", ".")
        + "[router.curve.clients.a]\nmax_pending = 5"
    )
    curve = load(folder, text).router.curve

    assert curve is not None
    assert (curve.secret_key_file, curve.authorized_keys_dir) == (str(folder / "good.key_secret"), str(folder))
    assert (curve.clients["a"].max_pending, curve.clients["a"].max_priority) == (5, None)


def test_threads_that_preprocess_are_bounded_over_all_models(folder: Path) -> None:
    def models(*threads: int) -> str:
        return "".join(
            f'[[model]]\nname = "m{n}"\nhandler = "toys:Echo"\npreprocess_threads = {count}\n'
            for n, count in enumerate(threads)
        )

    assert [s.preprocess_threads for s in load(folder, "", model=models(3, 16)).specs] == [3, 16]
    assert sum(s.preprocess_threads for s in load(folder, "", model=models(*[1] * 64)).specs) == 64
    assert load(folder, "", model=models(*[16] * 7, 15))
    (error,) = refused(folder, "", model=models(*[16] * 8))
    assert str(error) == "model[0].preprocess_threads: expected at most 127 threads in all models together, found 128"
