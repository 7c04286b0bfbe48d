"""The sockets in the runtime directory: missed when somebody removes them, and made anew, since without them nobody could join, or steer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gpupool.logs import Log

from . import events as ev
from .control import ControlServer
from .instance import Instance, is_missing
from .listeners import BindError, Listeners

#: A socket that is missing for so long was removed, and is not just being made anew.
_GONE_S: Final = 2.0


class SocketWatch:
    """Looks with every tick; `feed` is told when the router has lost the workers' socket, so that another router takes the new one."""

    def __init__(
        self, instance: Instance, listeners: Listeners, control: ControlServer, *, feed: Callable[[ev.Event], None], log: Log
    ) -> None:
        self._instance = instance
        self._listeners = listeners
        self._control = control
        self._feed = feed
        self._log = log
        self._gone_since: float | None = None
        self._reopening: asyncio.Task[None] | None = None

    def tick(self, now: float, *, workers_wanted: bool) -> None:
        """Make anew what has been missing for a while.

        Args:
            now: monotonic seconds.
            workers_wanted: False while no router serves, or it is to end: one that starts must be up to be replaced.
        """
        runtime = self._instance.runtime
        gone = {path for path in (runtime.workers, runtime.control) if is_missing(path)}
        if not workers_wanted:
            gone.discard(runtime.workers)
        if not gone:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        elif now > self._gone_since + _GONE_S:
            self._gone_since = now  # once in a while, not in every tick
            self._log.event.error("sockets_vanished", paths=[str(path) for path in gone])
            try:
                self._instance.restore()
                if runtime.workers in gone:
                    self._listeners.reopen_workers()
            except (OSError, BindError) as e:
                self._log.event.error("runtime_directory_lost", error=str(e))
                return  # those who are connected still are: nothing is ended for what cannot be mended
            if runtime.workers in gone:
                self._feed(ev.RouterDeaf())  # it listens where nobody can come any more
            if runtime.control in gone:
                self._reopening = asyncio.get_running_loop().create_task(self._reopen_control())

    async def _reopen_control(self) -> None:
        self._control.close()
        with suppress(OSError):
            await self._control.start()
