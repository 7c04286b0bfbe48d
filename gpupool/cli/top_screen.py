"""The screen of `gpupool top`: the pool live in a terminal, with keys to look into a worker and to steer it.

Whoever is asked may be slow: a thread of its own asks for the status, and another one carries out what a key orders, so that no key ever waits.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Footer, OptionList, Static

from gpupool.exits import Exit
from gpupool.paths import RuntimeDir
from gpupool.visible import visible, visible_lines

from .control import ask, status_of
from .output import Failure
from .rates import Row, head, rows
from .stacks import headline, look, target_of
from .top_lines import event_line, heading, pool_lines, worker_line

_REFRESH_S: Final = 1.0
#: Rates are those of so many looks: steadier than from one to the next.
_LOOKS: Final = 5
_EVENTS: Final = 100
_STACKS_S: Final = 10.0
_STATE_STYLE: Final = {
    "ready": "green",
    "parked": "bold red",
    "quarantined": "bold red",
    "lost": "bold red",
    "unkillable": "bold red",
}
_LEVEL_STYLE: Final = {"warning": "yellow", "error": "bold red", "critical": "bold red"}


class Handed(Message):
    """Something for the screen, from a thread."""

    def __init__(self, show: Callable[[], None]) -> None:
        super().__init__()
        self.show = show


class Top(App[int]):
    """The screen. Everything that waits runs on threads, which hand over what they found as messages."""

    TITLE = "gpupool top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #pool { height: 2; }
    #heading { height: 1; text-style: bold; background: $panel; }
    #workers { height: auto; max-height: 50%; border: none; padding: 0; background: $background; }
    #workers > .option-list--option { padding: 0; }
    #title { height: 1; background: $panel; }
    #pane { height: 1fr; }
    #message { height: 1; }
    """
    BINDINGS: ClassVar = [
        Binding("d", "steer('drain')", "drain"),
        Binding("r", "steer('resume')", "resume"),
        Binding("R", "restart", "restart"),
        Binding("s", "stacks", "stacks"),
        Binding("e", "events", "events"),
        Binding("p", "pause", "pause"),
        Binding("q", "quit", "quit"),
        Binding("y", "confirm", show=False),
        Binding("n,escape", "leave", show=False),
        Binding("pagedown", "scroll(1)", show=False, priority=True),
        Binding("pageup", "scroll(-1)", show=False, priority=True),
    ]

    def __init__(self, runtime: RuntimeDir) -> None:
        super().__init__()
        self._runtime = runtime
        self._looks: deque[dict[str, Any]] = deque(maxlen=_LOOKS + 1)
        self._rows: list[Row] = []
        self._pool: tuple[Any, Any] | None = None  # which pool is shown: its pid, and since when it runs
        self._paused = False
        self._to_restart: int | None = None  # what `y` would restart
        self._ordering = False  # an order is under way; one at a time
        self._events_title = "events"
        self._events: list[Text] = []
        self._stacks: str | None = None  # shown in the pane instead of events
        self._stop = threading.Event()

    def compose(self) -> ComposeResult:
        """Lay out, from top to bottom."""
        yield Static("asking the pool …", id="pool", markup=False)
        yield Static(heading(), id="heading", markup=False)
        yield OptionList(id="workers", markup=False)
        yield Static("events", id="title", markup=False)
        with VerticalScroll(id="pane", can_focus=False):
            yield Static(id="text", markup=False)
        yield Static(id="message", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one("#workers").focus()
        self._start(self._watch)

    def on_unmount(self) -> None:
        """Look no more."""
        self._stop.set()

    # Looking.

    def _watch(self) -> None:
        """Ask again and again; on a thread."""
        has_events = True
        while not self._stop.is_set():
            if not self._paused:
                try:
                    document = status_of(self._runtime)
                except Failure as failure:
                    self._hand_over(self._show_absence, failure.message)
                else:
                    events, has_events = self._ask_events(has_events)
                    self._hand_over(self._show, document, events)
            self._stop.wait(_REFRESH_S)

    def _ask_events(self, asked: bool) -> tuple[list[dict[str, Any]] | str, bool]:
        """Ask for the last events; words when there are none to be had. The second: whether to ask again."""
        if not asked:
            return "this pool keeps no events", False
        try:
            return list(ask(self._runtime, "events", limit=_EVENTS)["events"]), True
        except Failure as failure:
            return failure.message, failure.code != "unknown_verb"
        except (TypeError, KeyError):
            return "this pool keeps no events", False

    def _show(self, document: dict[str, Any], events: list[dict[str, Any]] | str) -> None:
        chosen = self._chosen() if self._pool in (None, _pool_of(document)) else None
        is_first = self._pool is None
        if self._pool != _pool_of(document):
            self._pool = _pool_of(document)
            self._looks.clear()
            self._ask_no_more("it is another pool now")
        self._looks.append(document)
        before = self._looks[0] if len(self._looks) > 1 else None
        self.query_one("#pool", Static).update("\n".join(pool_lines(head(document, before))))
        shown, self._rows = [row.worker for row in self._rows], rows(document, before)
        self._show_workers(shown, self._rows[0].worker if is_first and self._rows else chosen)
        if isinstance(events, str):
            self._events_title, self._events = f"events: {events}", []
        else:
            self._events_title = "events, the newest first"
            self._events = [Text(event_line(e), _LEVEL_STYLE.get(str(e.get("level")), "")) for e in reversed(events)]
        self._show_pane()

    def _show_absence(self, why: str) -> None:
        self._looks.clear()  # what comes next is of another time
        self.query_one("#pool", Static).update(Text(f"NOT REACHABLE, still trying\n{visible(why)}", "bold red"))

    def _show_workers(self, shown: list[int], chosen: int | None) -> None:
        """Show the rows, `shown` being those before; the choice stays with its worker, and ends with it."""
        workers = self.query_one("#workers", OptionList)
        lines = [Text(worker_line(row), _STATE_STYLE.get("late" if row.late else row.state, "yellow")) for row in self._rows]
        numbers = [row.worker for row in self._rows]
        if numbers == shown:  # the list stays where it was scrolled to
            for at, line in enumerate(lines):
                workers.replace_option_prompt_at_index(at, line)
        else:
            workers.clear_options().add_options(lines)
        workers.highlighted = numbers.index(chosen) if chosen in numbers else None
        if self._to_restart not in numbers:
            self._ask_no_more(f"worker {self._to_restart} is no longer part of the pool")

    def _ask_no_more(self, why: str) -> None:
        if self._to_restart is not None:
            self._to_restart = None
            self._say(f"not restarted: {why}")

    def _show_pane(self) -> None:
        title, text = self._events_title, Text("\n").join(self._events)
        if self._stacks is not None:
            title, _, body = self._stacks.partition("\n")
            text = Text(visible_lines(body))
        self.query_one("#title", Static).update(f"{visible(title)}{'   (PAUSED)' if self._paused else ''}")
        self.query_one("#text", Static).update(text)

    # Keys.

    def action_steer(self, verb: str) -> None:
        """Drain or resume the chosen worker."""
        worker = self._chosen()
        if worker is not None:
            self._order(verb, f"{verb} worker {worker}", partial(self._steer, verb, worker, self._pool))

    def action_restart(self) -> None:
        """Ask whether the chosen worker is to be restarted."""
        self._to_restart = self._chosen()
        if self._to_restart is not None:
            self._say(f"restart worker {self._to_restart}? y/n")

    def action_confirm(self) -> None:
        """Restart it."""
        worker, self._to_restart = self._to_restart, None
        if worker is not None:
            self._order("restart", f"restart worker {worker}", partial(self._steer, "restart", worker, self._pool))

    def action_leave(self) -> None:
        """Do not restart, or leave the stacks."""
        if self._to_restart is not None:
            self._to_restart = None
            self._say("not restarted")
        else:
            self.action_events()

    def action_stacks(self) -> None:
        """Show the stacks of the chosen worker."""
        worker = self._chosen()
        if worker is not None:
            self._order("stacks", f"stacks of worker {worker}", partial(self._look_into, worker, self._pool))

    def action_events(self) -> None:
        """Show the events again."""
        self._stacks = None
        self._show_pane()

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self._paused = not self._paused
        self._show_pane()

    def action_scroll(self, pages: int) -> None:
        """Turn the pane's page; the arrows belong to the workers."""
        pane = self.query_one("#pane", VerticalScroll)
        pane.scroll_page_down(animate=False) if pages > 0 else pane.scroll_page_up(animate=False)

    # Orders.

    def _order(self, code: str, words: str, act: Callable[[], str]) -> None:
        """Carry out an order on a thread, and say how it went."""
        self._to_restart = None
        if self._ordering:
            self._say(f"{words}: another order is still under way")
            return
        self._ordering = True
        self._say(f"{words} …")

        def run() -> None:
            try:
                said = act()
            except Failure as failure:
                said = f"{words}: {failure.message}"
            except Exception as e:  # a bug of ours must not leave the screen deaf
                said = f"{code} failed: {type(e).__name__}: {e}"
            self._hand_over(self._done, said)

        self._start(run)

    def _steer(self, verb: str, worker: int, pool: tuple[Any, Any] | None) -> str:
        self._now(pool)
        answer = ask(self._runtime, verb, workers=[str(worker)], **({"force": False} if verb == "restart" else {}))
        with suppress(TypeError, KeyError, IndexError):
            return f"{verb} ordered; worker {worker} is {answer['workers'][0]['state']}"
        return f"{verb} ordered"

    def _now(self, pool: tuple[Any, Any] | None) -> dict[str, Any]:
        """Ask for the status anew: what is shown may be old, and of a pool that another has followed."""
        document = status_of(self._runtime)
        if _pool_of(document) != pool:
            raise Failure("another_pool", "it is another pool now", Exit.FAILED)
        return document

    def _look_into(self, worker: int, pool: tuple[Any, Any] | None) -> str:
        target = target_of(self._now(pool), self._runtime, str(worker))
        seen = look(target, timeout_s=_STACKS_S)
        more = "\n… and more, cut off here" if seen.truncated else ""
        self._hand_over(self._show_stacks, f"{headline(target, seen)}\n{seen.text}{more}")
        return "e: events again, page up and down: more"

    def _show_stacks(self, text: str) -> None:
        self._stacks = text
        self._show_pane()
        self.query_one("#pane", VerticalScroll).scroll_home(animate=False)

    def _done(self, said: str) -> None:
        self._ordering = False
        asked = "" if self._to_restart is None else f"; restart worker {self._to_restart}? y/n"
        self._say(f"{said}{asked}")

    def _say(self, words: str) -> None:
        self.query_one("#message", Static).update(visible(words))

    def _chosen(self) -> int | None:
        at = self.query_one("#workers", OptionList).highlighted
        return None if at is None or at >= len(self._rows) else self._rows[at].worker

    def _start(self, run: Callable[[], None]) -> None:
        # Not textual's own workers: leaving the program would wait for them, up to the time limit of a pool that hangs.
        threading.Thread(target=run, daemon=True).start()

    def _hand_over(self, show: Callable[..., None], *values: Any) -> None:
        with suppress(RuntimeError):  # the screen has gone meanwhile
            self.post_message(Handed(lambda: show(*values)))

    def on_handed(self, message: Handed) -> None:
        """Show what a thread has found, unless the program is being left: then the widgets may be gone before the last message."""
        if self.is_running:
            message.show()


def _pool_of(document: dict[str, Any]) -> tuple[Any, Any]:
    return document["pool"].get("pid"), document["pool"].get("started_at")


def run(runtime: RuntimeDir) -> int:
    """Show the pool until somebody quits.

    Raises:
        Failure: there is no terminal.
    """
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # textual draws on stderr
        raise Failure("no_terminal", "top needs a terminal; for programs there is `gpupool status --json`", Exit.USAGE)
    Top(runtime).run()
    return Exit.OK
