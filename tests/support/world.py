"""A world for the supervisor's core: plays the shell, the processes and the router in virtual time.

Commands that the pool gives are carried out as the real shell would, with processes that load, join, beat, die or hang as the test
wants. Nothing here waits: an hour costs as much as its events.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from gpupool.board import Phase, SlotRecord
from gpupool.supervisor import commands as cmd
from gpupool.supervisor import events as ev
from gpupool.supervisor.capacity import DegradeRule
from gpupool.supervisor.liveness import LivenessPolicy
from gpupool.supervisor.policy import Policy
from gpupool.supervisor.pool import Pool
from gpupool.supervisor.restart import RestartPolicy

TICK_S = 0.2

POLICY = Policy(
    restart=RestartPolicy(delays_s=(0.0, 5.0, 30.0, 60.0), stable_after_s=300.0, max_restarts=5, period_s=600.0),
    liveness=LivenessPolicy(heartbeat_timeout_s=2.0, load_timeout_s=600.0, batch_timeout_s=60.0),
    degrade=(DegradeRule(1.0, 0.75, 0.5), DegradeRule(0.51, 0.5, 0.2)),
)


@dataclass
class Process:
    """A pretended worker process."""

    slot: int
    incarnation: int
    born: float
    pid: int
    joined: bool = False
    frozen: bool = False
    in_kernel: bool = False  # SIGKILL does not end it
    phase: Phase = Phase.IMPORT
    phase_deadline: float = 0.0
    beat: float = 0.0
    batches: int = 0


@dataclass
class World:
    """The pool and all that it acts on."""

    slots: int = 2
    policy: Policy = POLICY
    seed: int = 1
    load_s: float = 1.0
    router_starts: bool = True
    now: float = 1000.0
    fails_to_load: set[int] = field(default_factory=set)
    exit_code: int = 1
    log: list[cmd.Command] = field(default_factory=list)
    processes: dict[int, Process] = field(default_factory=dict)
    router_held: set[int] = field(default_factory=set)
    router_alive: bool = False
    router_draining: bool = False
    overflow: int = 0  # of the slots
    busy: set[int] = field(default_factory=set)  # slots with requests that do not end by themselves
    quit_code: int | None = None
    spawns: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = Pool(self.slots, self.policy, random.Random(self.seed), overflow=self.overflow)
        self._pid = 100
        self._waiting: list[ev.Event] = []

    def start(self) -> World:
        """Begin and run until all that can be ready is."""
        self.feed(ev.Started())
        self.run(self.load_s + 1.0)
        return self

    def feed(self, event: ev.Event) -> list[cmd.Command]:
        """Hand one event to the pool and carry out its commands."""
        self._waiting.append(event)
        if len(self._waiting) > 1:
            return []  # it arose while another one was carried out, and comes after it, as in the real shell
        first: list[cmd.Command] | None = None
        while self._waiting:
            commands = self.pool.handle(self._waiting[0], self.now)
            self.log += commands
            first = commands if first is None else first
            for command in commands:
                self._carry_out(command)
            self._waiting.pop(0)
        return first or []

    def run(self, seconds: float, *, late_s: float = 0.0) -> None:
        """Let virtual time pass, tick by tick."""
        end = self.now + seconds
        while self.now < end and self.quit_code is None:
            self.now += TICK_S
            for process in list(self.processes.values()):
                self._live(process)
            if self.router_draining and not self.busy and self.router_alive:
                self.router_draining = False
                self.feed(ev.RouterDrained())
            self.feed(ev.Tick([self.record(n) for n in range(self.slots)], late_s))

    def kill(self, slot: int, *, signal: str = "SIGKILL", code: int | None = None) -> list[cmd.Command]:
        """End a process from outside."""
        process = self.processes.pop(slot)
        self.busy.discard(slot)
        exit_ = ev.Exit(code, None if code is not None else signal, "killed from outside")
        return self.feed(ev.WorkerExited(slot, process.incarnation, exit_, (1, 2)))

    def record(self, slot: int) -> SlotRecord:
        """What the board shows."""
        p = self.processes.get(slot)
        fields: dict[str, Any] = dict.fromkeys(SlotRecord.__dataclass_fields__, 0) | {"phase": Phase.NONE}
        if p:
            fields |= {
                "incarnation": p.incarnation, "pid": p.pid, "phase": p.phase, "beat_ns": int(p.beat * 1e9),
                "phase_deadline_ns": int(p.phase_deadline * 1e9), "batches": p.batches,
            }  # fmt: skip
        return SlotRecord(**fields)

    def states(self) -> list[str]:
        """Slot states, in order."""
        return [str(s.state) for s in self.pool.slots]

    def told(self, kind: str) -> list[dict[str, Any]]:
        """What the router was told of one kind."""
        return [c.message for c in self.log if isinstance(c, cmd.TellRouter) and c.message["t"] == kind]

    def _carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.SpawnWorker(slot, incarnation):
                assert slot not in self.processes, f"two processes in slot {slot}"
                self._pid += 1
                self.spawns.append((self.now, slot))
                self.processes[slot] = Process(slot, incarnation, self.now, self._pid, beat=self.now)
                self.feed(ev.WorkerSpawned(slot, incarnation, self._pid))
            case cmd.SpawnRouter(epoch):
                self.router_alive = self.router_starts
                self.router_held.clear()  # a new one knows nothing
                if self.router_starts:
                    self.feed(ev.RouterUp(epoch, ["tcp://127.0.0.1:1"]))
                else:
                    self.feed(ev.RouterExited(epoch, ev.Exit(1, None, "exit code 1")))
            case cmd.SignalWorker(slot, incarnation, name):
                process = self.processes.get(slot)
                if process and process.incarnation == incarnation:
                    self._signal(process, name)
            case cmd.KillRouter(epoch):
                self.router_alive = False
                self.feed(ev.RouterExited(epoch, ev.Exit(None, "SIGKILL", "killed")))
            case cmd.TellRouter(message):
                self._router(message)
            case cmd.Quit(code):
                self.quit_code = code
            case _:
                pass

    def _signal(self, process: Process, name: str) -> None:
        dies = name == "SIGKILL" or not process.frozen
        if process.in_kernel or not dies:
            return
        del self.processes[process.slot]
        self.busy.discard(process.slot)
        clean = name == "SIGTERM" and process.joined
        exit_ = ev.Exit(0, None, "exit code 0") if clean else ev.Exit(None, name, f"killed by {name}")
        self.feed(ev.WorkerExited(process.slot, process.incarnation, exit_, () if clean else (1,)))

    def _router(self, message: dict[str, Any]) -> None:
        assert self.router_alive, f"told a dead router: {message}"
        match message["t"]:
            case "hold":
                self.router_held.add(message["slot"])
                if message["slot"] not in self.busy:
                    self.feed(ev.WorkerIdle(message["slot"]))
            case "release":
                self.router_held.discard(message["slot"])
            case "drain":
                self.router_draining = True
            case "stop":
                self.router_alive = False
                self.busy.clear()
                self.feed(ev.RouterExited(self.pool.router.epoch, ev.Exit(0, None, "exit code 0")))
            case _:
                pass

    def _live(self, p: Process) -> None:
        if p.frozen:
            return
        p.beat = self.now
        if p.joined:
            return
        age = self.now - p.born
        p.phase = Phase.IMPORT if age < self.load_s / 2 else Phase.LOAD
        if age >= self.load_s and p.slot in self.fails_to_load:
            del self.processes[p.slot]
            self.feed(ev.WorkerFailed(p.slot, p.incarnation, "config: no forward"))
            self.feed(ev.WorkerExited(p.slot, p.incarnation, ev.Exit(self.exit_code, None, f"exit code {self.exit_code}"), ()))
        elif age >= self.load_s and self.router_alive:
            p.joined, p.phase = True, Phase.IDLE
            self.feed(ev.WorkerLoaded(p.slot, p.incarnation, {}))
            self.feed(ev.WorkerJoined(p.slot, p.incarnation))
            if p.slot in self.router_held:
                self.feed(ev.WorkerIdle(p.slot))
