"""`gpupool explain REQUEST_ID`: the life of one request from the log: where its time went, and what happened to it on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpupool.exits import Exit
from gpupool.paths import RuntimeDir
from gpupool.visible import visible

from .control import status_of
from .event_line import line_of, moment
from .life import Life, Lives, Part, parts, untold
from .log_search import Search
from .log_source import Source, journal, log_files, standard_input
from .options import JsonOption, RuntimeDirOption, runtime_of
from .output import Failure, print_json, print_text

_BAR: Final = 40
_HOW: Final = "give it with --log FILE, or pipe it: kubectl logs … | gpupool explain ID --log -"


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="As in the reply; binary ids in hexadecimal.")],
    log: Annotated[
        str | None, typer.Option(metavar="FILE", help="The log, .gz too, or - for standard input.", show_default=False)
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only of this connection, or of this key's name.", show_default=False)
    ] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back the host's journal is read.")] = "24 hours ago",
    json_output: JsonOption = False,
    runtime_dir: RuntimeDirOption = None,
) -> int:
    """Tell the life of a request: its stages, its workers, what became of them. Exit 1: the log does not have it."""
    runtime = runtime_of(runtime_dir)
    devices: dict[int, str] = {}
    if log is None:
        source, devices = _of_pool(runtime, since)
    else:
        source = standard_input() if log == "-" else log_files(Path(log))
    lives = Lives(request_id, client)
    search = Search(lives.needles)
    for record in search.records(source.blocks()):
        lives.take(record)
    found = lives.found()
    if not found:
        raise _not_found(request_id, client, source, search)
    for life in found:
        life.devices = {**devices, **life.devices}
    if json_output:
        print_json(
            {"request_id": request_id, "log": source.name, "left_out": lives.left_out, "lives": [_plain(x) for x in found]}
        )
        return Exit.OK
    for n, life in enumerate(found):
        print_text("\n".join([*([""] if n else []), *map(visible, text_of(request_id, life))]))
    if lives.left_out:
        print_text(f"\n{lives.left_out} older requests with this id are left out; --client narrows")
    return Exit.OK


def text_of(request_id: str, life: Life) -> Iterator[str]:
    """Yield the lines of one life."""
    record = life.record
    known = record or life.moves[0]
    user = f", key {known['user']}" if known.get("user") else ""
    yield f"request {request_id} of client {known.get('client')}{user}, came {moment(life.began)}"
    if record is None:
        yield "  its own line is not in the log: it is still open, or the log ends before, or logs.request_sample left it out"
    else:
        yield f"  {_outcome(record)}"
        if where := _where(life, record):
            yield f"  {where}"
    split = parts(record, life.moves) if record else []
    total = sum(part.us for part in split)
    if split:
        width = max(len(_named(part, life)) for part in split)
        yield ""
        for part in split:
            yield f"  {_named(part, life):<{width}}  {part.us / 1e3:>12,.3f} ms  {_bar(part.us, total)}".rstrip()
        yield f"  {'total':<{width}}  {total / 1e3:>12,.3f} ms"
        if any(part.us < 0 for part in split):
            yield "  a part is below zero: the records contradict each other (is a line of its returns missing?)"
        if record and (missing := untold(record, life.moves)):
            yield (
                f"  it was sent to workers {record['sends']} times; of {missing} return{'s' if missing > 1 else ''} the log has no line: "
                "that time is in the last part"
            )
    happened = sorted([*life.moves, *life.around], key=lambda r: r.get("time") or 0)
    if happened:
        yield ""
        yield "  what happened:"
        for event in happened:
            yield f"    {line_of({**_with_device(event, life.devices), 'client': None, 'user': None, 'request_id': None})}"


def _outcome(record: Mapping[str, Any]) -> str:
    took = f" after {record['total_ms']:,.3f} ms" if isinstance(record.get("total_ms"), int | float) else ", never queued"
    message = f": {record['message']}" if record.get("message") else ""
    return f"{record.get('code')}{took}{message}"


def _where(life: Life, record: Mapping[str, Any]) -> str:
    """Which model and worker, in what batch, how often."""
    words = []
    if record.get("model"):
        words.append(f"model {record['model']}")
    if (slot := record.get("worker")) is not None:
        incarnation = f", incarnation {record['incarnation']}" if record.get("incarnation") else ""
        overflow = ", for overflow" if record.get("overflow") else ""
        words.append(f"worker {slot}{_card(slot, life.devices)}{incarnation}{overflow}")
    if record.get("batch_size"):
        words.append(f"in a batch of {record['batch_size']}")
    if record.get("attempts"):
        words.append(f"{record['attempts']} attempt{'s' if record['attempts'] > 1 else ''}")
    words.append(f"{record.get('input_bytes', 0):,} bytes in, {record.get('output_bytes', 0):,} out")
    return "; ".join(words)


def _named(part: Part, life: Life) -> str:
    if part.worker is None or len(life.workers) < 2:
        return part.name
    return f"{part.name}, worker {part.worker}{_card(part.worker, life.devices)}"


def _card(slot: Any, devices: Mapping[int, str]) -> str:
    return f" ({devices[slot]})" if slot in devices else ""


def _bar(us: int, total: int) -> str:
    return "█" * max(0, round(_BAR * us / total)) if total else ""


def _with_device(event: Mapping[str, Any], devices: Mapping[int, str]) -> dict[str, Any]:
    device = devices.get(event["worker"]) if isinstance(event.get("worker"), int) else None
    return {**({"device": device} if device else {}), **event}


def _plain(life: Life) -> dict[str, Any]:
    record = life.record
    split = parts(record, life.moves) if record else []
    return {
        "request": record,
        "began": life.began,
        "parts": [{"name": part.name, "ms": part.us / 1e3, "worker": part.worker} for part in split],
        "devices": {slot: life.devices.get(slot) for slot in life.workers},
        "redispatched": life.moves,
        "around": [_with_device(event, life.devices) for event in life.around],
    }


def _of_pool(runtime: RuntimeDir, since: str) -> tuple[Source, dict[int, str]]:
    """Find where the running pool's log goes, and which card each worker has.

    Raises:
        Failure: no pool runs here, or its log is out of reach.
    """
    try:
        status = status_of(runtime)
    except Failure as failure:
        raise Failure(failure.code, f"{failure.message} Where is its log? {_HOW}", failure.exit_code) from None
    devices = {w["worker"]: str((w.get("device") or {}).get("id")) for w in status["workers"]}
    pool = status["pool"]
    if pool.get("log_file"):
        return log_files(Path(pool["log_file"])), devices
    if pool.get("log_unit"):
        return journal(str(pool["log_unit"]), since), devices
    raise Failure("no_log", f"the pool's log goes to a pipe or a terminal, and cannot be read from here; {_HOW}")


def _not_found(request_id: str, client: str | None, source: Source, search: Search) -> Failure:
    whose = f" of client {client}" if client else ""
    if search.first is None or search.last is None:
        what = "is empty" if not search.size_bytes else 'holds no JSON records (is it logs.format = "console"?)'
        return Failure("not_found", f"request {request_id!r}{whose}: {source.name} {what}")
    reach = f"{source.name} reaches from {moment(search.first['time'])} to {moment(search.last['time'])}"
    sample = "a logs.request_sample below 1 may have left it out, and the log's level must be info"
    return Failure(
        "not_found", f"request {request_id!r}{whose} is not in the log: {reach}; {sample}", Exit.FAILED,
        log=source.name, first_time=search.first["time"], last_time=search.last["time"],
    )  # fmt: skip
