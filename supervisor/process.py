"""One child process: started by exec with what it may inherit, watched by its pidfd, read line by line, never waited for.

Spawning happens on the main thread only: the parent-death signal that children ask for is bound to the thread that made them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from gpupool.board import ENV_FD as BOARD_FD
from gpupool.channel import ENV_FD as CHANNEL_FD
from gpupool.channel import Channel
from gpupool.child import ENV_LIFE, ENV_PARENT

from .events import Exit

#: Lines of its output that are kept for the report of its end.
TAIL_LINES: Final = 10
_READ_BYTES: Final = 65536
#: Reads of what a dead child left in a pipe: more than a pipe can hold, and a bound if a helper of its goes on writing.
_LAST_READS: Final = 32
#: A line without an end is passed on in pieces of this size.
_MAX_LINE: Final = 65536
#: What belongs to the supervisor's own dialogue with systemd must not reach children: a stray READY=1 would be believed.
_PRIVATE_ENV: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class Loop(Protocol):
    """What is needed of the event loop."""

    def add_reader(self, fd: int, callback: Callable[..., object], *args: object) -> object:
        """Call back while the descriptor is readable."""

    def remove_reader(self, fd: int) -> object:
        """Stop watching."""


class Child:
    """A running child and its four lines to us: pidfd, channel, stdout, stderr."""

    def __init__(
        self,
        module: str,
        *,
        loop: Loop,
        environment: Mapping[str, str],
        board_fd: int,
        life_fd: int,
        log_fd: int,
        more_fds: Collection[int] = (),
        on_exit: Callable[[Child], None],
        on_readable: Callable[[Child], None],
        on_line: Callable[[Child, str, str], None],
    ) -> None:
        """Start `python -m module`, which inherits `more_fds` under their numbers beside what every child does.

        Raises:
            OSError: when it cannot be started.
        """
        self._loop = loop
        self._on_exit, self._on_line = on_exit, on_line
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.cause = ""  # why it was killed, where somebody knows more than its exit status tells
        self.channel, theirs = Channel.pair()
        pipes: list[tuple[int, int]] = []
        self._process: subprocess.Popen[bytes] | None = None
        try:
            pipes += [os.pipe2(os.O_CLOEXEC)]
            pipes += [os.pipe2(os.O_CLOEXEC)]
            env = {k: v for k, v in os.environ.items() if k not in _PRIVATE_ENV}
            env |= environment
            env |= {
                BOARD_FD: str(board_fd), CHANNEL_FD: str(theirs.fileno()), ENV_LIFE: str(life_fd), ENV_PARENT: str(os.getpid()),
            }  # fmt: skip
            self._process = subprocess.Popen(
                # -P: the folder we were started in must not shadow a module of ours or of a library's.
                [sys.executable, "-P", "-m", module],
                env=env, stdin=subprocess.DEVNULL, stdout=pipes[0][1], stderr=pipes[1][1],
                pass_fds=(board_fd, theirs.fileno(), life_fd, log_fd, *more_fds),
                process_group=0,  # a terminal's Ctrl-C is ours to handle, and its helpers can be ended with it
            )  # fmt: skip
            self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            # Short of descriptors, perhaps: nothing may stay behind, least of all a process that nobody watches.
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self.channel.close()
            for read_end, _ in pipes:
                os.close(read_end)
            raise
        finally:
            theirs.close()
            for _, write_end in pipes:
                os.close(write_end)
        self.pid = self._process.pid
        self._outputs: dict[int, tuple[str, bytearray]] = {}
        for (read_end, _), source in zip(pipes, ("stdout", "stderr"), strict=True):
            os.set_blocking(read_end, False)
            self._outputs[read_end] = (source, bytearray())
            loop.add_reader(read_end, self._read_output, read_end)
        loop.add_reader(self._pidfd, self._exited)
        loop.add_reader(self.channel.fileno(), on_readable, self)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal by pidfd: it cannot hit another process. SIGCONT follows, else a stopped process would not see it.

        SIGKILL goes to its process group too: helpers that a model started would keep the card.
        """
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            signal.pidfd_send_signal(self._pidfd, number)
            if number not in (signal.SIGKILL, signal.SIGCONT):
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)
        except ProcessLookupError:
            pass

    def ignore_channel(self) -> None:
        """Stop reading the channel: its other end is gone."""
        self._loop.remove_reader(self.channel.fileno())

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Before it is reaped: its pid, and with it the group's number, cannot have been given to anybody else yet.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self.code = self._process.wait()
        for fd in list(self._outputs):
            for _ in range(_LAST_READS):
                if not self._read_output(fd):
                    break
        self._on_exit(self)
        self._close()

    def exit(self) -> Exit:
        """Tell how it ended; only after the exit callback."""
        if self.code >= 0:
            return Exit(self.code, None, f"exit code {self.code}", tuple(self.tail))
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return Exit(None, name, self.cause or f"killed by {name}", tuple(self.tail))

    def _read_output(self, fd: int) -> bool:
        """Pass on what one read brings; False when there is nothing (more) to read."""
        source, held = self._outputs[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        held += data
        *lines, rest = held.split(b"\n")
        held[:] = rest
        if len(held) > _MAX_LINE or (not data and held):
            lines.append(bytearray(held))
            held.clear()
        for line in lines:
            text = bytes(line).decode("utf-8", "replace").rstrip()
            if text:
                if source == "stderr":
                    self.tail.append(text[-500:])
                self._on_line(self, source, text)
        if not data:
            self._drop_output(fd)
        return bool(data)

    def _drop_output(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        del self._outputs[fd]
        os.close(fd)

    def _close(self) -> None:
        for fd in list(self._outputs):
            self._drop_output(fd)
        self._loop.remove_reader(self._pidfd)
        self.ignore_channel()
        self.channel.close()
        os.close(self._pidfd)


def raise_oom_score(pid: int, score: int) -> None:
    """Make the kernel's OOM killer prefer a process; raising the score needs no privilege."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))


def thread_environment(threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Size each thread pool that a library would else size to the whole machine; an operator's own value wins, an empty one is none."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: str(threads) for name in names if not inherited.get(name)}
