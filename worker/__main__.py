"""One worker process, from attaching to the supervisor to the last answer: `python -m gpupool.worker`, started by the supervisor.

Threads: this, the main one, loads models and runs batches; `link` hears and speaks; `beat` tells that the interpreter lives; those of
`preparers` preprocess, where a model has that.
The process ends by os._exit after flushing: threads and exit hooks of a model must not keep a card occupied.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from gpupool import child, logs
from gpupool.board import Phase
from gpupool.exits import Exit
from gpupool.spec import WorkerSpec, worker_spec
from gpupool.stack_dump import StackDump

from .backlog import Backlog
from .batcher import Batcher
from .beat import Beat
from .budget import share_one_heap
from .ceiling import Ceilings
from .device import Device, DeviceError
from .execute import Executor, check_outputs
from .exhaustion import Exhaustion
from .faults import FaultKind, StickyFault
from .intake import Intake
from .link import Link
from .memory import Memory
from .models import LoadError, Model, import_model, load_model, put_first, threads, warm_up
from .preparers import Preparers
from .profile import Profiles
from .record import Record
from .replies import Replies
from .report import Report
from .snapshot import Snapshots

#: How long the last results may take to leave.
_FLUSH_TIMEOUT_S = 3.0
#: The interpreter's turn between threads. With the default of 5 ms every message waits that long for a model that computes in Python
#: (16 clients, forward of 10 ms in pure Python, batches of 4: p99 62 ms, with this 43 ms, and the throughput the same).
_SWITCH_S = 0.0005
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Worker:
    """What this process consists of."""

    def __init__(self, inherited: child.Inheritance, spec: WorkerSpec) -> None:
        self.spec = spec
        self.channel = inherited.channel
        self.log = logs.configure(
            "worker", spec.log, words=False, worker=spec.slot, incarnation=spec.incarnation, device=spec.device_id
        )
        self.record = Record(inherited.board, spec.slot)
        inherited.board.claim(spec.slot, spec.incarnation, os.getpid())
        self.policies = [m.batching for m in spec.models]
        self.ceilings, self.exhaustion = Ceilings(threading.RLock()), Exhaustion(threading.Lock())
        self.backlog = Backlog(Batcher(self.policies, self.ceilings), self.record)
        self.device = Device(spec.device, spec.device_id)
        self.memory = Memory(self.device, self.ceilings, self.exhaustion, spec.memory, self.log)
        self.snapshots = Snapshots(
            self.describe, self.device.torch, lambda: self.backlog.between_batches(spec.batch_timeout_s),
            inherited.channel.send, self.log,
        )  # fmt: skip
        self.profiles = Profiles(
            self.room, self.backlog.run_between, inherited.channel.send,
            lambda reason: inherited.channel.send({"t": "recycle", "reason": reason}), self.log,
            card=spec.device != "cpu", last_batch_s=spec.batch_timeout_s,
        )  # fmt: skip
        self.link = Link(
            spec, inherited.board, inherited.channel, self.record, self.backlog, self.log, self.leave, self.memory.settings,
            self.snapshots.order, self.profiles.order,
        )  # fmt: skip
        self.preparers = Preparers(())
        self.beat = Beat(
            inherited.board, self.record, self.log, slot=spec.slot, interval_s=spec.heartbeat_interval_s, epoch_changed=self.link.wake,
            busy_since=self.busy_since, piece_timeout_s=spec.batch_timeout_s,
        )  # fmt: skip
        self.report = Report(inherited.channel, self.log)
        self.report.add("log", self.log.report)
        self.stack_dump = StackDump(spec.stacks_file)

    def run(self) -> NoReturn:
        """Do all of it; returns never."""
        self.record.phase(Phase.IMPORT, self.spec.load_timeout_s)
        self.beat.start()
        self.link.start()
        self.listen()
        # Blocked in between: a signal that reaches the child before it is disowned would be written into our pipe.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS),
            after_in_child=self.disown,
        )
        try:
            self.serve(self.load())
        except LoadError as e:
            self.fail(Exit.BAD_CONFIG if e.stage == "config" else Exit.MODEL_FAILED, e.stage, e.message, e.trace)
        except StickyFault as e:  # while batches were measured
            self.record.error(FaultKind.STICKY)
            self.log.event.error("device_poisoned", detail=str(e))
            self.leave(Exit.REPLACE_ME)
        except DeviceError as e:
            self.fail(Exit.DEVICE_UNUSABLE, "device", str(e), "")
        except BaseException as e:  # a bug of ours: say so, and end although a model's threads may still run
            self.log.event.error("worker_failed", exc_info=e)
            self.leave(Exit.FAILED)

    def listen(self) -> None:
        """Let signals reach the link at once, even while the main thread is deep in C code.

        The handlers themselves do nothing. SIGHUP gets one too rather than SIG_IGN, which helper programs of a model would inherit.
        """
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.link.signal_fd, warn_on_full_buffer=False)

    def disown(self) -> None:
        """In a process that a model has forked: its signals are its own, and must not reach this worker's link."""
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self.channel.close()

    def load(self) -> list[Model]:
        """Import, load and warm up every model, all of it within load_timeout_s of the start."""
        spec = self.spec
        until = time.monotonic() + spec.load_timeout_s
        self.device.prepare(spec.memory)
        for folder in reversed(spec.search_path):
            put_first(folder)
        models = [import_model(m) for m in spec.models]
        self.device.set_threads(threads())
        self.record.progress()
        self.record.phase(Phase.LOAD, until - time.monotonic())
        for model in models:
            load_model(model, spec.device)
            self.record.progress()
        self.device.set_threads(threads())
        self.record.phase(Phase.WARM_UP, until - time.monotonic())
        check = functools.partial(check_outputs, to_host=self.device.to_host)
        warm = []
        for model in models:
            warm.append(warm_up(model, check, self.device.release))
            self.record.progress()
        # What was loaded stays: the collections between measurements need not look at it.
        gc.collect()
        gc.freeze()
        self.preparers = Preparers(
            models, self.record.beside, self.link.wake, self.device.relieve, self.give_back, self.hungry
        )  # fmt: skip
        self.preparers.start()  # before memory is measured: their stacks count
        self.memory.measure(models, warm, check, self.record.progress)
        return models

    def serve(self, models: list[Model]) -> NoReturn:
        """Run batches until told to stop."""
        record, backlog, link, profiles = self.record, self.backlog, self.link, self.profiles
        executor = Executor(
            models, self.policies, record, self.device, self.ceilings, self.log, self.exhaustion,
            batch_timeout_s=self.spec.batch_timeout_s,
        )  # fmt: skip
        self.listen()  # a model that loaded may have taken the signals for itself
        self.stack_dump.listen_anew()
        # What was loaded stays: later collections need not look at it again.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH_S)
        record.phase(Phase.IDLE)
        backlog.refresh()
        self.report.add("memory", self.memory.report)
        self.report.add("batching", lambda: backlog.report([m.spec.name for m in models]))
        self.beat.each_time = backlog.refresh
        names = [{"name": m.spec.name, "version": m.spec.version} for m in models]
        self.channel.send({"t": "loaded", "models": names, "device": self.device.describe(), "memory": self.memory.report()})
        self.beat.each_time = self.each_beat  # reports come after that
        self.log.event.info("models_loaded", models=[m["name"] for m in names])
        intake = Intake(
            models, self.policies, self.preparers, beside=record.beside, relieve=self.device.relieve, hungry=self.starved
        )
        link.open(intake, Replies(models, beside=record.beside, relieve=self.device.relieve, hungry=self.starved))
        while (taken := backlog.next_batch()) is not None:
            batch, samples = taken
            try:
                if profiles.on:
                    name = f"gpupool: a batch of {models[batch.key[0]].spec.name}"
                    done, clean = profiles.run(name, lambda b=batch, s=samples: executor.run(b, s))  # type: ignore[misc]
                else:
                    done, clean = executor.run(batch, samples)
            except StickyFault as e:
                self.log.event.error("device_poisoned", detail=str(e), batch_size=batch.rows)
                link.finish(_FLUSH_TIMEOUT_S)
                self.leave(Exit.REPLACE_ME)
            link.deliver(done)
            record.idle()
            backlog.ran(batch, done.started_at, done.forward_s, clean=clean)
            self.device.tidy()
            if self.log.level <= logs.LEVELS["debug"]:
                self.log.event.debug(
                    "batch", model=models[batch.key[0]].spec.name, bucket=batch.key[1], batch_size=batch.rows,
                    reason=str(batch.reason), forward_ms=round(done.forward_s * 1000, 3), clean=clean,
                )  # fmt: skip
            del taken, batch, samples, done  # held through the next wait, they would hold a batch's tensors
        record.phase(Phase.STOPPING, _FLUSH_TIMEOUT_S)
        link.finish(_FLUSH_TIMEOUT_S)
        self.leave(Exit.OK)

    def give_back(self) -> None:
        """Give back what a failure beside the inference thread has left, and be ready for the next one."""
        self.device.release()
        self.device.brace()

    def hungry(self) -> None:
        """Count a sample that did not fit into memory even alone in preprocess, where no other thread is now."""
        now = time.monotonic()
        self.exhaustion.failed(1, now)
        if self.exhaustion.overdue(now):
            with self.backlog.between_batches(self.spec.batch_timeout_s) as at_rest:
                if at_rest:
                    self.exhaustion.judge(self.device.at_rest(), time.monotonic())

    def starved(self) -> None:
        """Count a sample for which the link's thread had too little memory, in length or postprocess."""
        self.exhaustion.failed(1, time.monotonic())
        self.give_back()

    def describe(self) -> dict[str, Any]:
        """Say who this is and how its memory stands."""
        spec = self.spec
        return {"worker": spec.slot, "incarnation": spec.incarnation, "device": spec.device_id, "memory": self.memory.report()}

    def room(self) -> int | None:
        """Say what host memory this process may still take; None: there is no limit."""
        limit = self.device.host.limit()
        return None if limit is None else limit - self.device.host.used()

    def each_beat(self) -> None:
        """Do what is to be done now and then; called by the beat's thread."""
        self.stack_dump.listen()  # should the model have come to use its signal
        self.backlog.refresh()
        self.look_for_lost_memory()
        self.report.tick()

    def look_for_lost_memory(self) -> None:
        """Where batches fail for want of memory, look at what is held while nothing runs and nothing waits: the model holds that."""
        now = time.monotonic()
        if self.exhaustion.suspects(now) and self.quiet():
            held = self.device.at_rest()
            if self.quiet():  # else what has come meanwhile may be part of it
                self.exhaustion.judge(held, now)
                self.log.event.info("memory_looked_at", held_bytes=held, loaded_bytes=self.memory.loaded_bytes)
        if (reason := self.exhaustion.take_reason()) is not None:
            self.channel.send({"t": "recycle", "reason": reason})

    def quiet(self) -> bool:
        """Whether this process holds no request, as far as it can know: one may be on its way."""
        return not self.link.busy_since and self.backlog.quiet

    def busy_since(self) -> dict[str, float]:
        """Say since when each thread beside this one has been at what it does, in monotonic seconds; 0 when it waits."""
        return {"link": self.link.busy_since, **self.preparers.busy_since()}

    def fail(self, code: Exit, stage: str, message: str, trace: str) -> NoReturn:
        """Tell the supervisor why this worker cannot work, and end."""
        self.record.error(FaultKind.MODEL)
        self.log.event.error("load_failed", stage=stage, message=message, traceback=trace)
        self.channel.send({"t": "failed", "stage": stage, "message": message, "traceback": trace})
        self.leave(code)

    def leave(self, code: int) -> NoReturn:
        """End this process now; may be called from any thread."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.log.close()
        os._exit(code)


def main() -> NoReturn:
    """Run one worker."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(all_threads=True)
    inherited = child.attach()
    spec = worker_spec(inherited.spec)
    if spec.log.fd > 2 and not spec.log.file:
        os.set_inheritable(spec.log.fd, False)
    if spec.cpus:
        with contextlib.suppress(OSError):  # the set may have been narrowed since; then the old one holds
            os.sched_setaffinity(0, spec.cpus)  # before any thread is started, and before torch counts its cores
    if spec.device == "cpu" and spec.memory.cpu_limit_bytes:
        share_one_heap()
    Worker(inherited, spec).run()


if __name__ == "__main__":
    main()
