"""Logging of one process: structlog events as JSON lines (or text for a console) through a LogSink, set up by one call.

Request lines come by the tens of thousands a second; they skip structlog's chain and go to the sink as ready-made records
(`Log.request`). Standard-library logging, warnings and uncaught exceptions end in the same lines.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import structlog

from gpupool.forward import Forwarder
from gpupool.log_file import LogFile
from gpupool.log_queue import Record
from gpupool.log_sink import LogSink, iso, render_json, tame
from gpupool.spec import LogSpec
from gpupool.visible import visible, visible_lines

#: How long what waits at the end may take to leave.
_CLOSE_S = 1.0
#: Characters of a line for people, and of a traceback below it.
_MAX_TEXT = 4000

_HEAD = "Traceback (most recent call last):\n"
#: Errors of a chain that are told without their words; a chain may be a ring.
_MOST_CAUSES = 8

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Log:
    """What a process logs with: structlog's methods by `log.event.info(...)`, request lines by `log.request(...)`."""

    def __init__(self, component: str, spec: LogSpec, **bound: Any) -> None:
        out = LogFile(spec.fd, spec.file)
        self._bound: Record = {"component": component, "pid": os.getpid(), **bound}
        self.level = LEVELS[spec.level]
        #: Shown each event, whatever the level; not request lines.
        self.tap: Callable[[Record], object] | None = None
        render = render_json if spec.format == "json" else render_text
        self.sink = LogSink(out, size=spec.queue_size, render=render, stamp=self._bound)
        self.event: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
            object(), wrapper_class=structlog.make_filtering_bound_logger(0), processors=[self._emit]
        )
        self._forwarder: Forwarder | None = None
        self._put = self.sink.put
        self._render = render
        self._closed = False
        if spec.fluentd:
            self._forwarder = Forwarder(
                spec.fluentd, f"gpupool.{component}", size=spec.queue_size, stamp=self._bound, event=self.event
            )
            self._put = self._put_both

    def set_level(self, level: int) -> None:
        """Change the level at run time (10 debug … 40 error)."""
        self.level = level

    def request(self, fields: Record) -> None:
        """Write the one canonical line of a request. The record is handed over: do not change it afterwards."""
        if self.level <= LEVELS["info"]:
            self._put({"time": time.time(), "timestamp": "", "level": "info", "event": "request", **self._bound, **fields})

    def remember(self, level: str, event: str, **fields: Any) -> None:
        """Show the tap an event that another process has logged."""
        if self.tap is not None:
            self.tap({"time": time.time(), "level": level, "event": event, **fields})

    def close(self) -> None:
        """Flush both ways, for a bounded time. Once is enough."""
        if self._closed:
            return
        self._closed = True
        if self._forwarder:
            self._forwarder.end(_CLOSE_S)
        self.sink.close(_CLOSE_S)
        if self._forwarder:
            self._forwarder.join()

    def forked(self) -> None:
        """In a forked child: the threads are not there, and their locks may be held for ever. Lines go to its stderr, at once."""
        self.tap = None
        self._closed = True
        self._bound = {**self._bound, "pid": os.getpid()}
        self._put = self._put_to_stderr

    def losses(self) -> dict[str, int]:
        """Return how many records of this process found no place in its log, by level; what is sampled away is not among them."""
        return dict(self.sink.dropped)

    def forwarding(self) -> dict[str, Any] | None:
        """Return how the Fluentd forward stands (`up`, `sent`, `dropped`, `waiting`), or None where there is none."""
        return self._forwarder.state() if self._forwarder else None

    def report(self) -> dict[str, Any]:
        """Return both, as the processes tell them to the supervisor."""
        return {"losses": self.losses(), "forwarding": self.forwarding()}

    def _put_both(self, record: Record) -> None:
        self.sink.put(record)
        if self._forwarder:
            self._forwarder.put(record)

    def _put_to_stderr(self, record: Record) -> None:
        with suppress(Exception):  # as everywhere here: a line that cannot be written costs nothing else
            os.write(2, self._render({**record, "timestamp": iso(record["time"])}))

    def _emit(self, _: Any, method: str, event: Any) -> Any:
        level = {"exception": "error", "warn": "warning", "msg": "info"}.get(method, method)
        if self.tap is not None or LEVELS.get(level, 50) >= self.level:
            if error := event.pop("exc_info", None):
                event["traceback"] = _traceback(error)
            record = {"time": time.time(), "timestamp": "", "level": level, **self._bound, **event}
            if self.tap is not None:
                self.tap(record)
            if LEVELS.get(level, 50) >= self.level:
                self._put(record)
        raise structlog.DropEvent


def configure(component: str, spec: LogSpec, *, words: bool = True, **bound: Any) -> Log:
    """Set up logging for this process, once. `bound` fields stand in every line.

    `words`: whether the texts of errors that nothing caught are written; those of a model's code may quote a client's data.

    Raises:
        OSError: when the log file cannot be opened.
    """
    log = Log(component, spec, **bound)
    root = logging.getLogger()
    root.handlers[:] = [_StdlibHandler(log)]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    tell = _told if words else _told_without_words
    sys.excepthook = lambda kind, error, trace: log.event.error("uncaught_exception", thread="main", **tell(kind, error, trace))
    threading.excepthook = lambda a: log.event.error(
        "uncaught_exception", thread=a.thread.name if a.thread else "?", **tell(a.exc_type, a.exc_value, a.exc_traceback)
    )
    # Of a finalizer, or a callback of C code. Nothing there may take a lock: the collector may have interrupted anything.
    sys.unraisablehook = lambda a: log.event.error(
        "uncaught_exception",
        where=getattr(a.object, "__qualname__", type(a.object).__name__),
        **tell(a.exc_type, a.exc_value, a.exc_traceback),
    )
    os.register_at_fork(after_in_child=log.forked)
    atexit.register(log.close)
    return log


def render_text(record: Record) -> bytes:
    """Make one line for people: time, level, who, event, then the rest as key=value."""
    rest = tame(record)
    stamp = str(rest.pop("timestamp", ""))[11:23]
    level, event, component = (str(rest.pop(k, "?")) for k in ("level", "event", "component"))
    who = component if (slot := rest.pop("worker", None)) is None else f"{component} {slot}"
    for name in ("time", "pid"):
        rest.pop(name, None)
    tail = rest.pop("traceback", None)
    words = " ".join(f"{k}={v}" for k, v in rest.items() if v not in (None, ""))
    # Ids and messages are clients' and models': none may command the terminal, nor begin a line of its own.
    text = visible(f"{stamp} {level:<7} {who:<10} {event} {words}".rstrip())[:_MAX_TEXT]
    if tail:
        text += "\n" + visible_lines(str(tail).rstrip())[-_MAX_TEXT:]
    return text.encode("utf-8", "replace") + b"\n"


class _StdlibHandler(logging.Handler):
    """Takes what libraries log through the standard library into the same lines."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Turn one stdlib record into an event `library_log`."""
        level = record.levelname.lower()
        level = level if level in LEVELS else "error"
        try:
            text = record.getMessage()
        except Exception as e:  # a library's bad format string must not become our fault
            text = f"{record.msg!r} ({type(e).__name__} while formatting)"
        fields: Record = {"source": record.name, "message": text}
        if record.exc_info and record.exc_info[1]:
            fields["traceback"] = _traceback(record.exc_info[1])
        getattr(self._log.event, level)("library_log", **fields)


def _told(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> dict[str, str]:
    text = "".join(traceback.format_exception(kind, error, trace))
    return {"error": traceback.format_exception_only(kind, error)[-1].strip() or kind.__name__, "traceback": text}


def _told_without_words(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> dict[str, str]:
    """Types and places alone, the cause first."""
    chain = [(kind, trace)]
    while error is not None and len(chain) < _MOST_CAUSES:
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if error is not None:
            chain.append((type(error), error.__traceback__))
    parts = ["".join([_HEAD, *traceback.format_tb(at), one.__name__, "\n"]) for one, at in reversed(chain)]
    return {"error": kind.__name__, "traceback": "\n".join(parts)}


def _traceback(error: Any) -> str:
    if error is True:
        return traceback.format_exc()
    if isinstance(error, BaseException):
        return "".join(traceback.format_exception(error))
    if isinstance(error, tuple):
        return "".join(traceback.format_exception(*error))
    return str(error)
