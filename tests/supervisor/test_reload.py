"""What a reload changes and what it must leave alone."""

from __future__ import annotations

from pathlib import Path

from gpupool.config import Config, load_config
from gpupool.config_forms import LEAK_LOOKS
from gpupool.supervisor.leak import CELLS
from gpupool.supervisor.reload import contradictions, difference, merged

HEAD = '[pool]\nruntime_dir = "run"\ndevices = "cpu:1"\n'


def config(folder: Path, text: str) -> Config:
    (folder / "toys.py").write_text("class A:\n    def forward(self, b): return b\nclass B(A): pass\n")
    file = folder / "pool.toml"
    file.write_text(HEAD + text)
    return load_config(file)


def model(name: str, handler: str = "A", extra: str = "") -> str:
    return f'[[model]]\nname = "{name}"\nhandler = "toys:{handler}"\n{extra}'


def test_live_keys_are_taken_over_and_all_others_stay_and_are_named_again_next_time(tmp_path: Path) -> None:
    old = config(tmp_path, model("a"))
    new = config(tmp_path, '[router]\nmax_pending = 7\nmax_attempts = 5\nbind = ["tcp://127.0.0.1:6000"]\n' + model("a"))
    now = merged(old, new)
    assert (now.router.max_pending, now.router.max_attempts, now.router.bind) == (7, 2, old.router.bind)
    assert difference(now, new).applied == ()
    assert difference(now, new).needs_restart == ("router.bind", "router.max_attempts")


def test_a_model_that_the_new_file_leaves_out_stays_as_it_is(tmp_path: Path) -> None:
    old = config(tmp_path, model("a") + model("b", "B", "max_batch = 4\nmin_batch = 1\n"))
    new = config(tmp_path, model("a", extra="max_batch = 16\n"))
    now = merged(old, new)
    assert [(s.name, s.batching.max_batch) for s in now.specs] == [("a", 16), ("b", 4)]


def test_models_are_told_apart_by_name_not_by_place(tmp_path: Path) -> None:
    a, b = model("a", extra="max_batch = 16\n"), model("b", "B", "max_batch = 9\n")
    now = merged(config(tmp_path, a + b), config(tmp_path, b + a))
    assert [(s.name, s.batching.max_batch) for s in now.specs] == [("a", 16), ("b", 9)]


def test_threads_that_preprocess_wait_for_a_restart(tmp_path: Path) -> None:
    old, new = config(tmp_path, model("a")), config(tmp_path, model("a", extra="preprocess_threads = 4\nmax_batch = 16\n"))
    now = merged(old, new)
    assert [(s.preprocess_threads, s.batching.max_batch) for s in now.specs] == [(1, 16)]
    assert difference(now, new).needs_restart == ("model[0].preprocess_threads",)


def test_a_live_key_that_would_contradict_one_that_needs_a_restart_is_told(tmp_path: Path) -> None:
    old = config(tmp_path, "[supervision]\nheartbeat_interval_s = 1.0\nheartbeat_timeout_s = 3.0\n" + model("a"))
    new = config(tmp_path, "[supervision]\nheartbeat_interval_s = 0.1\nheartbeat_timeout_s = 0.4\n" + model("a"))
    assert contradictions(old) == contradictions(new) == []
    assert "heartbeat_interval_s, which stays 1" in contradictions(merged(old, new))[0]


def test_a_leak_window_must_fit_the_heartbeat_that_stays(tmp_path: Path) -> None:
    old = config(tmp_path, "[supervision]\nheartbeat_interval_s = 1.0\n" + model("a"))
    new = config(tmp_path, "[supervision]\nheartbeat_interval_s = 0.1\nleak_window_s = 10.0\n" + model("a"))
    assert "leak_window_s 10 needs to be at least 36" in contradictions(merged(old, new))[0]
    assert LEAK_LOOKS == CELLS


def test_bounds_of_clients_are_live_and_the_keys_files_are_not(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).write_text("0" * 40)
        (tmp_path / name).chmod(0o600)
    curve = '[router.curve]\nauthorized_keys_dir = "."\nsecret_key_file = "{}"\n'
    old = config(tmp_path, curve.format("old") + "[router.curve.clients.a]\nmax_pending = 1\n" + model("a"))
    new = config(tmp_path, curve.format("new") + "[router.curve.clients.b]\nmax_priority = 2\n" + model("a"))

    found = difference(old, new)
    assert all(key.startswith("router.curve.clients.") for key in found.applied)
    assert {"router.curve.clients.a.max_pending", "router.curve.clients.b.max_priority"} <= set(found.applied)
    assert found.needs_restart == ("router.curve.secret_key_file",)
    now = merged(old, new).router.curve
    assert now is not None
    assert (list(now.clients), now.secret_key_file) == (["b"], str(tmp_path / "old"))


def test_encryption_begins_with_a_restart_and_so_do_the_bounds_of_its_clients(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0" * 40)
    (tmp_path / "key").chmod(0o600)
    old = config(tmp_path, model("a"))
    text = '[router.curve]\nauthorized_keys_dir = "."\nsecret_key_file = "key"\n[router.curve.clients.a]\nmax_pending = 1\n'
    new = config(tmp_path, text + model("a"))

    assert difference(old, new).applied == ()
    assert merged(old, new).router.curve is None
