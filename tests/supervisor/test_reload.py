"""What a reload changes and what it must leave alone."""

from __future__ import annotations

from pathlib import Path

from gpupool.config import Config, load_config
from gpupool.supervisor.reload import difference, merged

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
