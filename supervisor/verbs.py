"""What the command line can ask of a running pool: each verb checked, logged with who asked, turned into an event."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from . import drill
from . import events as ev
from .control import Refused, Verb
from .devices import DeviceError, choose
from .log_levels import COMPONENTS, LEVELS
from .reload import contradictions, difference, merged

if TYPE_CHECKING:
    from .loop import Supervisor

Peer = tuple[int, int]
#: How long a drill is followed when the asker does not say, and at the most.
_DRILL_S: Final = 180.0
_MAX_DRILL_S: Final = 3600.0
#: How long a snapshot or a profile may trace, and how long its taking may last when the asker does not say.
_MAX_TRACE_S: Final = 3600.0
_TAKING_S: Final = 120.0
#: How long another log level holds when the asker does not say (debug is easily forgotten), and at the most.
_LEVEL_S: Final = 600.0
_MAX_LEVEL_S: Final = 86400.0
#: Batches of one profile: what it records of each takes memory.
_MAX_BATCHES: Final = 1000


class Verbs:
    """The verbs of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._reload_lock = asyncio.Lock()
        self._drilling = False

    def table(self) -> dict[str, Verb]:
        """Verb by name, for the control socket."""
        return {
            "status": self._status, "drain": self._drain, "resume": self._resume, "restart": self._restart, "reload": self._reload,
            "release": self._release,
            "drill": self._drill, "clear_poison": self._clear_poison, "snapshot": self._snapshot, "events": self._events,
            "log_level": self._log_level,
            "profile": self._profile,
        }  # fmt: skip

    async def _status(self, _: dict[str, Any], __: Peer) -> Any:
        return await self._supervisor.status()

    async def _events(self, args: dict[str, Any], _: Peer) -> Any:
        worker = args.get("worker")
        if worker is not None:  # one that is not there is an error, not an empty answer
            args = {**args, "worker": str(self._slot(str(worker)))}
        return self._supervisor.chronicle.answer(args)

    async def _drain(self, args: dict[str, Any], peer: Peer) -> Any:
        slots = self._slots("drain", args, peer)
        self._supervisor.feed(ev.DrainAsked(slots))
        return self._answer(slots)

    async def _resume(self, args: dict[str, Any], peer: Peer) -> Any:
        slots = self._slots("resume", args, peer)
        if cards := self._supervisor.cards:
            cards.take_back(slots)
        self._supervisor.feed(ev.ResumeAsked(slots))
        return self._answer(slots)

    async def _release(self, args: dict[str, Any], peer: Peer) -> Any:
        slots = self._slots("release", args, peer)
        self._supervisor.feed(ev.ReleaseAsked(slots))
        if cards := self._supervisor.cards:
            cards.release(slots)
        return self._answer(slots)

    async def _restart(self, args: dict[str, Any], peer: Peer) -> Any:
        slots = self._slots("restart", args, peer)
        before = self._answer(slots)
        self._supervisor.feed(ev.RestartAsked(slots, force=bool(args.get("force"))))
        return before

    async def _reload(self, _: dict[str, Any], peer: Peer) -> Any:
        self._supervisor.log.event.info("asked", verb="reload", uid=peer[0], by=peer[1])
        return await self.reload()

    async def _clear_poison(self, args: dict[str, Any], peer: Peer) -> Any:
        s = self._supervisor
        prefix = args.get("hash")
        if not isinstance(prefix, str) or not re.fullmatch("[0-9a-f]{0,32}", prefix):
            raise Refused("bad_request", "hash: expected the first hexadecimal digits of a hash, or none for all")
        s.log.event.info("asked", verb="clear_poison", hash=prefix, uid=peer[0], by=peer[1])
        answer = await s.children.ask_router("clear_poison", prefix=prefix)
        if answer is None:
            raise Refused("refused", "the router does not answer now")
        if prefix and not answer["cleared"]:
            raise Refused("unknown_hash", f"no refused request has a hash that begins with {prefix}")
        return {"cleared": answer["cleared"]}

    async def _log_level(self, args: dict[str, Any], peer: Peer) -> Any:
        s = self._supervisor
        component, level, for_s = str(args.get("component")), args.get("level"), args.get("for_s", _LEVEL_S)
        if level not in (*LEVELS, "default"):
            raise Refused("bad_request", f"level: expected one of {', '.join(LEVELS)}, default")
        if not isinstance(for_s, int | float) or not 0 <= for_s <= _MAX_LEVEL_S:
            raise Refused("bad_request", f"for_s: expected a number of seconds from 0 (it stays) to {_MAX_LEVEL_S:g}")
        target = component if component in COMPONENTS else self._level_slot(component)
        s.log.event.info("asked", verb="log_level", target=component, to=level, for_s=for_s, uid=peer[0], by=peer[1])
        s.log_levels.ask(target, str(level), time.monotonic(), for_s)
        s.set_log_levels()
        return s.log_levels.document(time.monotonic())

    def _level_slot(self, component: str) -> int:
        try:
            return self._slot(component)
        except Refused as refused:
            raise Refused("unknown_component", f"{refused.message}; and {', '.join(COMPONENTS)}") from None

    async def _drill(self, args: dict[str, Any], peer: Peer) -> Any:
        s = self._supervisor
        slot, force, timeout_s = self._slot(str(args.get("worker"))), bool(args.get("force")), args.get("within_s", _DRILL_S)
        try:
            kind = drill.Kind(str(args.get("kind")))
        except ValueError:
            raise Refused("bad_request", f"kind: expected one of {', '.join(drill.Kind)}") from None
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _MAX_DRILL_S:
            raise Refused("bad_request", f"within_s: expected a number above 0 and at most {_MAX_DRILL_S:g}")
        if self._drilling:
            raise Refused("refused", "another drill is under way")
        if (reason := drill.refusal(s.pool, slot, time.monotonic(), force=force)) is not None:
            raise Refused("refused", reason)
        s.log.event.info("asked", verb="drill", kind=str(kind), workers=[slot], force=force, uid=peer[0], by=peer[1])
        self._drilling = True
        try:
            return await drill.run(s, slot, kind, timeout_s=timeout_s)
        finally:
            self._drilling = False

    async def _snapshot(self, args: dict[str, Any], peer: Peer) -> Any:
        slot = self._slot(str(args.get("worker")))
        return await self._look_into("snapshot", slot, args, peer, path=str(self._supervisor.runtime.snapshot(slot)))

    async def _profile(self, args: dict[str, Any], peer: Peer) -> Any:
        slot, batches = self._slot(str(args.get("worker"))), args.get("batches", 10)
        if type(batches) is not int or not 1 <= batches <= _MAX_BATCHES:
            raise Refused("bad_request", f"batches: expected a whole number from 1 to {_MAX_BATCHES}")
        path = self._supervisor.runtime.profile(slot)
        return await self._look_into("profile", slot, args, peer, path=str(path), batches=batches)

    async def _look_into(self, what: str, slot: int, args: dict[str, Any], peer: Peer, **fields: Any) -> Any:
        """Have a worker look into itself for some seconds, and pass on what it says of the file that it wrote."""
        s = self._supervisor
        seconds, within_s = args.get("seconds", 0.0), args.get("within_s", _TAKING_S)
        for name, value in (("seconds", seconds), ("within_s", within_s)):
            if not isinstance(value, int | float) or not 0 <= value <= _MAX_TRACE_S:
                raise Refused("bad_request", f"{name}: expected a number of seconds from 0 to {_MAX_TRACE_S:g}")
        child = s.child(slot)
        if child is None or not s.pool.slots[slot].joined:
            raise Refused("refused", f"worker {slot} is {s.pool.slots[slot].state}: it has loaded no models")
        if s.pool.slots[slot].late:  # it could not hear of it
            raise Refused(
                "refused",
                f"worker {slot} gives no sign of life: its beat is missing; `gpupool stacks {slot}` shows where it stands",
            )
        s.log.event.info("asked", verb=what, workers=[slot], seconds=seconds, uid=peer[0], by=peer[1])
        answer = await s.children.ask_worker(child, what, seconds + within_s, seconds=seconds, **fields)
        if answer is None:
            raise Refused("refused", f"worker {slot} gave no {what} within {seconds + within_s:g} s, or ended")
        if "error" in answer:
            raise Refused(f"{what}_failed", f"worker {slot}: {answer['error']}")
        return {"worker": slot, **{key: value for key, value in answer.items() if key not in ("t", "n")}}

    async def reload_quietly(self) -> None:
        """Reload on SIGHUP: there is nobody to answer to but the log."""
        with suppress(Refused):
            await self.reload()

    async def reload(self) -> dict[str, Any]:
        """Read the configuration again; apply what can be applied to the running pool, name the rest.

        Raises:
            Refused: the file is bad. Nothing has changed then.
        """
        s = self._supervisor
        async with self._reload_lock:
            s.notifier.reloading(time.monotonic())
            try:
                return await self._reload_now()
            finally:
                s.notifier.reloaded()  # also when refused: the pool serves on

    async def _reload_now(self) -> dict[str, Any]:
        from gpupool.config import ConfigErrors, load_config

        s = self._supervisor
        try:
            # In threads: hashing a model's files, and asking NVML, take longer than the loop may stand still.
            config = await asyncio.to_thread(load_config, s.config.source)
            # Not while a device is released: NVML would hold it open again.
            if config.pool.devices != s.config.pool.devices and not (s.cards and s.cards.any_released):
                await asyncio.to_thread(choose, config.pool.devices, os.environ)
        except (ConfigErrors, DeviceError) as e:
            errors = [str(error) for error in e.errors] if isinstance(e, ConfigErrors) else [str(e)]
            raise Refused("bad_config", self._reload_refused(errors)) from None
        changes, result = difference(s.config, config), merged(s.config, config)
        if problems := contradictions(result):
            # A live key would contradict one that only holds from the next start.
            raise Refused("bad_config", f"{self._reload_refused(problems)}; restart the pool to change both")
        s.apply(result)
        s.log.event.info(
            "reloaded",
            config_generation=s.generation,
            applied=list(changes.applied),
            needs_restart=list(changes.needs_restart),
        )
        return {
            "config_generation": s.generation, "applied": list(changes.applied), "needs_restart": list(changes.needs_restart),
        }  # fmt: skip

    def _reload_refused(self, errors: Sequence[str]) -> str:
        """Note it for status and events, with the file that is at fault, and return what to answer."""
        s = self._supervisor
        said, file = "; ".join(errors), str(s.config.source)
        s.last_reload_error = said if file in said else f"{file}: {said}"
        s.log.event.error("reload_refused", errors=errors, file=file)
        return s.last_reload_error

    def _slots(self, verb: str, args: dict[str, Any], peer: Peer) -> list[int]:
        """Resolve worker names to slots; refuse unknown ones and those the verb cannot be done on.

        Raises:
            Refused: naming the worker.
        """
        s = self._supervisor
        names = args.get("workers")
        if names is None:
            slots = [n for n in range(len(s.devices)) if s.pool.refusal(verb, n) is None]
            if not slots:
                raise Refused("refused", s.pool.refusal(verb, 0) or "no worker")
        else:
            if not isinstance(names, list):
                raise Refused("bad_request", "workers: expected a list of slot numbers or device ids")
            slots = list(dict.fromkeys(self._slot(str(name)) for name in names))
            for slot in slots:
                if verb == "resume" and s.cards and (reason := s.cards.clear(slot)):
                    raise Refused("refused", reason)
                if (reason := s.pool.refusal(verb, slot)) is not None:
                    raise Refused("refused", reason)
        s.log.event.info("asked", verb=verb, workers=slots, force=args.get("force"), uid=peer[0], by=peer[1])
        return slots

    def _slot(self, name: str) -> int:
        devices = self._supervisor.devices
        if name.isdecimal() and str(int(name)) == name and int(name) < len(devices):
            return int(name)
        for number, device in enumerate(devices):
            if device.id == name:
                return number
        known = ", ".join(f"{n} ({d.id})" for n, d in enumerate(devices))
        raise Refused("unknown_worker", f"no worker {name!r}; there are {known}")

    def _answer(self, slots: list[int]) -> dict[str, Any]:
        all_slots = self._supervisor.pool.slots
        return {"workers": [{"worker": n, "incarnation": all_slots[n].incarnation, "state": all_slots[n].state} for n in slots]}
